// How fast the mover of the direct path is, without an agent: a child makes device memory, this
// program moves it into that child's private memory and back, once for each combination of
// settings.
//
//   stasis-mover-bench --gib 16 --threads 8,16 --buffer 8,32 --memory process,own
//
// One line for each combination, or with --json one object. Rates are GB/s (decimal), times
// seconds. "ceiling" is a copy whose content is not kept: the GPU, the bus and the ring alone. The
// child checks what comes back; a wrong word ends the program with status 1. The driver is the file
// named by STASIS_LIBCUDA, else libcuda.so.1; on the simulated one the figures mean nothing.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/channel.h"
#include "base/threads.h"
#include "base/units.h"
#include "direct/device_calls.h"
#include "direct/mover.h"
#include "direct/mover_process.h"
#include "direct/remote_memory.h"

namespace {

using namespace stasis;          // NOLINT(google-build-using-namespace): a program, not a header
using namespace stasis::direct;  // NOLINT(google-build-using-namespace): likewise
using nlohmann::json;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Settings {
  double gib = 4;
  int gpus = 1;
  std::uint64_t segment_mib = 512;
  std::vector<unsigned> threads = {8, 16};
  std::vector<std::uint64_t> buffers_mib = {8, 32};
  std::vector<std::uint64_t> rings_mib = {0};
  std::vector<std::string> memories = {"process", "private", "driver"};
  int rounds = 2;
  bool as_json = false;

  std::uint64_t per_gpu() const {
    const auto segments = static_cast<std::uint64_t>(gib * 1024) / segment_mib;
    return std::max<std::uint64_t>(1, segments) * segment_mib * kMiB;
  }
  std::uint64_t total() const { return per_gpu() * static_cast<std::uint64_t>(gpus); }
};

[[noreturn]] void die(const std::string& message) {
  std::fprintf(stderr, "stasis-mover-bench: %s\n", message.c_str());
  std::exit(2);
}

template <class T>
T need(Result<T> result) {
  if (!result) die(result.error().to_string() + "; " + result.error().remedy);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

// --- The child that has the memory

class Owner {
 public:
  explicit Owner(const Settings& settings) : settings_(settings) {
    calls_ = need(DeviceCalls::load());
    auto library = need(load_driver_library()).library;
    create_ = library.function<cuda::fn::cuMemCreate>("cuMemCreate");
    export_ =
        library.function<cuda::fn::cuMemExportToShareableHandle>("cuMemExportToShareableHandle");
    fill_ = library.function<cuda::fn::cuMemsetD32_v2>("cuMemsetD32_v2");
    get_ = library.function<cuda::fn::cuMemcpyDtoH_v2>("cuMemcpyDtoH_v2");
    synchronize_ = library.function<cuda::fn::cuCtxSynchronize>("cuCtxSynchronize");
    must(calls_.init(0), "cuInit");
    for (int gpu = 0; gpu < settings.gpus; ++gpu)
      make(gpu);
  }

  [[noreturn]] void serve(const Channel& bench) {
    (void)bench.send_value(std::uint64_t{1});
    void* host = nullptr;
    for (;;) {
      auto message = bench.receive(-1);
      if (!message || !*message) ::_exit(0);
      std::uint64_t reply = 1;
      const char command = (*message)->as<char>().value_or('?');
      if (command == 'e') {
        send_exports(bench);
        continue;
      }
      if (command == 'f') fill(kRight);
      if (command == 's') fill(kWrong);
      if (command == 'v') reply = right() ? 1 : 0;
      if (command == 'h') {  // new memory each time, as a suspended job has
        if (host != nullptr) ::munmap(host, settings_.total());
        host = ::mmap(nullptr, settings_.total(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (host == MAP_FAILED) die("no memory for the content");
        (void)::madvise(host, settings_.total(), MADV_HUGEPAGE);
        reply = reinterpret_cast<std::uint64_t>(host);
      }
      if (!bench.send_value(reply)) ::_exit(0);
    }
  }

 private:
  static constexpr unsigned kRight = 0x5eed0000;
  static constexpr unsigned kWrong = 0xdead0000;
  struct Piece {
    cuda::CUcontext context = nullptr;
    cuda::CUmemGenericAllocationHandle handle = 0;
    cuda::CUdeviceptr at = 0;
  };

  void must(cuda::CUresult code, const char* call) const {
    if (code != cuda::CUDA_SUCCESS)
      die(calls_.error(code, call, "make memory to move").to_string());
  }
  void make(int gpu) {
    cuda::CUcontext context = nullptr;
    must(calls_.retain_context(&context, gpu), "cuDevicePrimaryCtxRetain");
    must(calls_.set_context(context), "cuCtxSetCurrent");
    cuda::CUmemAllocationProp prop{};
    prop.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu};
    cuda::CUmemAccessDesc access{};
    access.location = prop.location;
    access.flags = cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const std::uint64_t bytes = settings_.segment_mib * kMiB;
    for (std::uint64_t at = 0; at < settings_.per_gpu(); at += bytes) {
      Piece piece;
      piece.context = context;
      must(create_(&piece.handle, bytes, &prop, 0), "cuMemCreate");
      must(calls_.reserve(&piece.at, bytes, 0, 0, 0), "cuMemAddressReserve");
      must(calls_.map(piece.at, bytes, 0, piece.handle, 0), "cuMemMap");
      must(calls_.set_access(piece.at, bytes, &access, 1), "cuMemSetAccess");
      pieces_.push_back(piece);
    }
  }
  void fill(unsigned kind) {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      must(calls_.set_context(pieces_[i].context), "cuCtxSetCurrent");
      const auto word = kind + static_cast<unsigned>(i);
      must(fill_(pieces_[i].at, word, settings_.segment_mib * kMiB / 4), "cuMemsetD32");
      must(synchronize_(), "cuCtxSynchronize");
    }
  }
  // Three stretches of each segment, its ends among them.
  bool right() {
    std::vector<unsigned> words(1024);
    const std::uint64_t bytes = words.size() * sizeof words[0];
    const std::uint64_t last = settings_.segment_mib * kMiB - bytes;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      must(calls_.set_context(pieces_[i].context), "cuCtxSetCurrent");
      for (const std::uint64_t offset : {std::uint64_t{0}, last / 2 / 4096 * 4096, last}) {
        must(get_(words.data(), pieces_[i].at + offset, bytes), "cuMemcpyDtoH");
        const auto word = kRight + static_cast<unsigned>(i);
        if (!std::all_of(words.begin(), words.end(), [&](unsigned w) { return w == word; }))
          return false;
      }
    }
    return true;
  }
  void send_exports(const Channel& bench) {
    for (std::size_t i = 0; i < pieces_.size();) {
      std::vector<UniqueFd> batch;
      for (; i < pieces_.size() && batch.size() < Channel::kMostDescriptors; ++i) {
        int fd = -1;
        must(export_(&fd, pieces_[i].handle, cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
             "cuMemExportToShareableHandle");
        batch.emplace_back(fd);
      }
      need(bench.send_value('d', batch));
    }
  }

  Settings settings_;
  DeviceCalls calls_;
  cuda::fn::cuMemCreate* create_ = nullptr;
  cuda::fn::cuMemExportToShareableHandle* export_ = nullptr;
  cuda::fn::cuMemsetD32_v2* fill_ = nullptr;
  cuda::fn::cuMemcpyDtoH_v2* get_ = nullptr;
  cuda::fn::cuCtxSynchronize* synchronize_ = nullptr;
  std::vector<Piece> pieces_;
};

// --- The measuring

struct Combination {
  std::string memory;
  unsigned threads = 0;
  std::uint64_t buffer_mib = 0;
  std::uint64_t ring_mib = 0;
};

struct Nowhere final : Content {
  Result<void> write(std::uint64_t, std::span<const std::byte>) override { return {}; }
  Result<void> read(std::uint64_t, std::span<std::byte>) override { return {}; }
};

class Bench {
 public:
  Bench(Settings settings, const Channel& owner, Pid pid)
      : settings_(std::move(settings)),
        owner_(&owner),
        pid_(pid),
        space_(std::make_shared<const proc::AddressSpace>(need(proc::AddressSpace::open(pid)))) {}

  json measure(const Combination& c) {
    (void)ask('f');
    const auto start = Clock::now();
    std::optional<MoverProcess> process;
    std::optional<Mover> inside;
    MoverOptions options{
        .threads = c.threads, .ring_bytes = c.ring_mib * kMiB, .buffer_bytes = c.buffer_mib * kMiB};
    if (c.memory == "process") {
      process.emplace(need(MoverProcess::start()));
      need(process->prepare(options, {}, never_, deadline()));
    } else {
      see_every_gpu();
      inside.emplace(need(Mover::prepare(options, {}, never_, deadline())));
    }
    MemoryMover& mover = process ? static_cast<MemoryMover&>(*process) : *inside;
    json row{{"memory", c.memory},
             {"threads", c.threads},
             {"buffer_mib", c.buffer_mib},
             {"ring_mib", c.ring_mib},
             {"prepare_s", since(start).count()}};

    Nowhere nowhere;
    row["ceiling_out"] = rate(need(mover.copy_out(exported(), nowhere, never_, deadline())));
    for (int round = 0; round < settings_.rounds; ++round) {
      RemoteMemory memory(space_, ask('h'), settings_.total());
      const auto faulting = Clock::now();
      need(memory.fault_in(c.threads, never_));
      const double faulted = rate(settings_.total(), since(faulting));
      if (round == 0) row["fault_in_first"] = faulted;  // may be memory that the machine never used
      keep_best(row, "fault_in", faulted);
      const CopyReport out = need(mover.copy_out(exported(), memory, never_, deadline()));
      keep_best(row, "out", rate(out));
      row["out_map_s"] = out.map_seconds.count();
      (void)ask('s');
      const CopyReport in = need(mover.copy_in(exported(), memory, never_, deadline()));
      keep_best(row, "in", rate(in));
      row["in_map_s"] = in.map_seconds.count();
      if (ask('v') != 1) die("what came back is wrong");
    }
    row["ceiling_in"] = rate(need(mover.copy_in(exported(), nowhere, never_, deadline())));
    if (process) process->end();  // so that its context is gone before the next one comes
    return row;
  }

 private:
  static Clock::time_point deadline() { return Clock::now() + std::chrono::minutes(5); }
  static double rate(std::uint64_t bytes, Seconds seconds) {
    return static_cast<double>(bytes) / std::max(seconds.count(), 1e-9) / 1e9;
  }
  static double rate(const CopyReport& report) { return rate(report.bytes, report.seconds); }
  static void keep_best(json& row, const char* name, double value) {
    row[name] = std::max(value, row.value(name, 0.0));
  }
  std::uint64_t ask(char command) const {
    need(owner_->send_value(command));
    auto message = need(owner_->receive(-1));
    return message ? message->as<std::uint64_t>().value_or(0) : 0;
  }
  std::vector<Segment> exported() const {
    std::vector<Segment> out;
    const std::uint64_t bytes = settings_.segment_mib * kMiB;
    need(owner_->send_value('e'));
    while (out.size() * bytes < settings_.total()) {
      auto message = need(owner_->receive(-1));
      if (!message) die("the child does not export");
      for (UniqueFd& fd : message->descriptors)
        out.push_back({std::move(fd), bytes, out.size() * bytes});
    }
    return out;
  }

  Settings settings_;
  const Channel* owner_;
  Pid pid_;
  std::shared_ptr<const proc::AddressSpace> space_;
  Interrupt never_;
};

void print(const json& row) {
  const auto number = [&](const char* name) { return row[name].get<double>(); };
  std::printf("%-8s %7u %10llu %8llu  %7.3f  %8.2f %7.2f %7.2f %7.2f %7.2f  %7.4f %7.4f\n",
              row["memory"].get<std::string>().c_str(), row["threads"].get<unsigned>(),
              row["buffer_mib"].get<unsigned long long>(),
              row["ring_mib"].get<unsigned long long>(), number("prepare_s"), number("fault_in"),
              number("out"), number("in"), number("ceiling_out"), number("ceiling_in"),
              number("out_map_s"), number("in_map_s"));
}

std::vector<Combination> combinations(const Settings& settings) {
  std::vector<Combination> out;
  for (const std::string& memory : settings.memories) {
    for (const unsigned threads : settings.threads) {
      for (const std::uint64_t buffer : settings.buffers_mib) {
        for (const std::uint64_t ring : settings.rings_mib) {
          const std::uint64_t whole =
              2 * threads * buffer * static_cast<std::uint64_t>(settings.gpus);
          out.push_back({memory, threads, buffer, ring != 0 ? ring : whole});
        }
      }
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Measures how fast GPU memory is moved out of a process and back.");
  app.add_option("--gib", settings.gib, "memory on each GPU")->capture_default_str();
  app.add_option("--gpus", settings.gpus, "how many GPUs")->capture_default_str();
  app.add_option("--segment", settings.segment_mib, "MiB of each allocation")
      ->capture_default_str();
  app.add_option("--threads", settings.threads, "for each GPU; several: 4,8,16")->delimiter(',');
  app.add_option("--buffer", settings.buffers_mib, "MiB; several: 8,32")->delimiter(',');
  app.add_option("--ring", settings.rings_mib, "MiB; 0: two buffers for each thread")
      ->delimiter(',');
  app.add_option("--memory", settings.memories,
                 "process: of a process of its own; own: of this one")
      ->delimiter(',')
      ->check(CLI::IsMember({"process", "own"}));
  app.add_option("--rounds", settings.rounds, "the best counts")->capture_default_str();
  app.add_flag("--json", settings.as_json, "one object instead of a table");
  CLI11_PARSE(app, argc, argv);

  // Nothing of the driver in this process: each combination has one of its own, and so the child.
  auto ends = need(Channel::pair());
  const pid_t child = ::fork();
  if (child < 0) die("cannot fork");
  if (child == 0) {
    ends.first.close();
    Owner(settings).serve(ends.second);
  }
  ends.second.close();
  auto ready = ends.first.receive(120000);
  if (!ready || !*ready) die("the child could not make its memory");

  if (!settings.as_json) {
    std::printf("%-8s %7s %10s %8s  %7s  %8s %7s %7s %7s %7s  %7s %7s\n", "memory", "threads",
                "buffer_mib", "ring_mib", "prepare", "fault_in", "out", "in", "ceil_o", "ceil_i",
                "map_o", "map_i");
  }
  json rows = json::array();
  int status = 0;
  for (const Combination& combination : combinations(settings)) {
    std::fflush(stdout);
    auto line = need(Channel::pair());
    const pid_t runner = ::fork();
    if (runner < 0) die("cannot fork");
    if (runner == 0) {
      line.first.close();
      const std::string row = Bench(settings, ends.first, Pid{child}).measure(combination).dump();
      (void)line.second.send(std::as_bytes(std::span(row)));
      ::_exit(0);
    }
    line.second.close();
    auto message = line.first.receive(-1);
    int ended = 0;
    ::waitpid(runner, &ended, 0);
    if (!message || !*message) {
      status = 1;
      continue;
    }
    const auto& bytes = (*message)->bytes;
    rows.push_back(json::parse(reinterpret_cast<const char*>(bytes.data()),
                               reinterpret_cast<const char*>(bytes.data()) + bytes.size()));
    if (!settings.as_json) print(rows.back());
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  if (settings.as_json) {
    const json report{{"gib_per_gpu", static_cast<double>(settings.per_gpu()) / (1 << 30)},
                      {"gpus", settings.gpus},
                      {"segment_mib", settings.segment_mib},
                      {"rows", rows}};
    std::printf("%s\n", report.dump().c_str());
  }
  return status;
}
