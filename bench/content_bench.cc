// How fast GPU content goes into an image and comes out of it, without a GPU: threads write loads
// as the mover does, into DIR, and read them back, once for each combination of settings.
//
//   stasis-content-bench DIR --gib 4 --threads 1,16 --chunk 256,1024 --compress none,lz4 --dd
//
// One line for each combination, or with --json one object. Rates are GB/s (decimal) of content,
// from the first byte until all is durable (--sync) or in the page cache. "cold" is read after the
// kernel has been asked to forget the files. Content: "random" shrinks by nothing, "weights" are
// bf16 numbers around 0, "text" shrinks by much; no two chunks are the same. --dd writes and reads
// as much with dd and direct I/O, in the same directory, in the same run.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "image/content_reader.h"
#include "image/content_writer.h"

namespace {

using namespace stasis;  // NOLINT(google-build-using-namespace): a program, not a header
using nlohmann::json;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Settings {
  std::string dir;
  double gib = 2;
  std::uint64_t load_kib = 2048;
  std::vector<unsigned> threads = {1, 2};
  std::vector<std::uint32_t> chunks_kib = {256};
  std::vector<std::string> compressions = {"none"};
  std::vector<std::string> contents = {"random"};
  std::vector<bool> direct = {false};
  bool sync = false;
  bool dd = false;
  int rounds = 1;
  bool as_json = false;

  std::uint64_t load() const { return load_kib << 10; }
  std::uint64_t loads() const { return static_cast<std::uint64_t>(gib * 1024) * kMiB / load(); }
  std::uint64_t bytes() const { return loads() * load(); }
};

[[noreturn]] void die(const std::string& message) {
  std::fprintf(stderr, "stasis-content-bench: %s\n", message.c_str());
  std::exit(2);
}

template <class T>
T need(Result<T> result) {
  if (!result) die(result.error().to_string() + "; " + result.error().remedy);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

using Memory = std::unique_ptr<std::byte, void (*)(void*)>;
Memory allocate(std::size_t bytes) {
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), &std::free);
  if (memory == nullptr) die("no memory");
  std::memset(memory.get(), 1, bytes);
  return memory;
}

void fill(std::byte* to, std::size_t bytes, const std::string& kind, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> weights(0.0F, 0.02F);
  for (std::size_t at = 0; at < bytes; at += 8) {
    std::uint64_t word = random();
    if (kind == "text") std::memcpy(&word, &"content writes, reader: chunks. "[8 * (word % 4)], 8);
    for (std::size_t i = 0; kind == "weights" && i < 4; ++i) {
      const float weight = weights(random);
      std::memcpy(reinterpret_cast<char*>(&word) + 2 * i,
                  reinterpret_cast<const char*>(&weight) + 2, 2);
    }
    std::memcpy(to + at, &word, 8);
  }
}

// No chunk of this load is that of another.
void mark(std::byte* load, std::size_t bytes, std::uint64_t number) {
  for (std::size_t at = 0; at < bytes; at += 64U << 10) {
    const std::uint64_t mark = (number << 16) + at;
    std::memcpy(load + at + 8, &mark, sizeof mark);
  }
}

// Calls work(number, two buffers) for each load from `threads` threads; returns the seconds.
template <class Work>
double in_threads(const Settings& settings, unsigned threads, const std::vector<Memory>& buffers,
                  const Work& work) {
  std::atomic<std::uint64_t> next = 0;
  const auto start = Clock::now();
  {
    std::vector<std::jthread> all;
    for (unsigned thread = 0; thread < threads; ++thread) {
      all.emplace_back([&, thread] {
        std::uint64_t turn = 0;
        for (std::uint64_t n = next++; n < settings.loads(); n = next++)
          need(work(n, buffers[thread].get() + (turn++ % 2) * settings.load()));
      });
    }
  }
  return since(start).count();
}

void forget(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto file = need(open_file(AT_FDCWD, entry.path().string(), O_RDONLY));
    ::fsync(file.get());
    ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

double run_dd(const std::vector<std::string>& words) {
  const auto start = Clock::now();
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<char*> argv = {const_cast<char*>("dd"), const_cast<char*>("status=none")};
    for (const std::string& word : words)
      argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execvp("dd", argv.data());
    ::_exit(127);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child || status != 0) die("dd has failed");
  return since(start).count();
}

class Bench {
 public:
  explicit Bench(Settings settings) : settings_(std::move(settings)) {}

  int run() {
    if (!settings_.as_json)
      std::printf("%-8s %7s %7s %9s %6s | %8s %8s %8s %8s %8s | %6s\n", "content", "threads",
                  "chunk", "compress", "direct", "write", "read", "verify", "cold rd", "cold vf",
                  "stored");
    json rows = json::array();
    for (int round = 0; round < settings_.rounds; ++round) {
      if (settings_.dd) rows.push_back(dd());
      for (const std::string& content : settings_.contents)
        for (const unsigned threads : settings_.threads)
          for (const std::uint32_t chunk : settings_.chunks_kib)
            for (const std::string& compression : settings_.compressions)
              for (const bool direct : settings_.direct)
                rows.push_back(one(content, threads, chunk, compression, direct));
    }
    if (settings_.as_json)
      std::printf("%s\n", json{{"gib", settings_.gib},
                               {"load_kib", settings_.load_kib},
                               {"sync", settings_.sync},
                               {"rows", rows}}
                              .dump(2)
                              .c_str());
    return 0;
  }

 private:
  double rate(double seconds) const {
    return static_cast<double>(settings_.bytes()) / seconds / 1e9;
  }

  // Each program writes zeros from one buffer: nothing but the disk takes time.
  json dd() {
    const std::string file = settings_.dir + "/dd-data";
    const std::string size = std::to_string(settings_.load());
    const std::string count = "count=" + std::to_string(settings_.loads());
    const double write =
        run_dd({"if=/dev/zero", "of=" + file, "bs=" + size, count, "oflag=direct", "conv=fsync"});
    const double read = run_dd({"if=" + file, "of=/dev/null", "bs=" + size, "iflag=direct"});
    ::unlink(file.c_str());
    if (!settings_.as_json)
      std::printf("%-42s | %8.2f %26s %8.2f\n", "dd with direct I/O", rate(write), "", rate(read));
    return {{"dd", true}, {"write", rate(write)}, {"cold_read", rate(read)}};
  }

  json one(const std::string& content, unsigned threads, std::uint32_t chunk_kib,
           const std::string& compression, bool direct) {
    std::string form = settings_.dir + "/content-bench-XXXXXX";
    if (::mkdtemp(form.data()) == nullptr) die("cannot make a folder in " + settings_.dir);
    const UniqueFd dir = need(open_file(AT_FDCWD, form, O_RDONLY | O_DIRECTORY));
    std::vector<Memory> buffers;
    for (unsigned i = 0; i < threads; ++i) {
      buffers.push_back(allocate(2 * settings_.load()));
      fill(buffers.back().get(), 2 * settings_.load(), content, i);
    }
    NoProgress progress;
    Interrupt interrupt;
    ContentOptions options;
    options.compression = compression == "zstd"  ? ContentCompression::kZstd
                          : compression == "lz4" ? ContentCompression::kLz4
                                                 : ContentCompression::kNone;
    options.direct_io = direct;
    options.sync = settings_.sync ? SyncPolicy::kDisk : SyncPolicy::kNone;
    options.chunk_bytes = chunk_kib << 10;
    const auto start = Clock::now();
    auto writer = need(ContentWriter::create(dir, options));
    need(writer.add_stream(Pid{1}, settings_.bytes(), {}));
    in_threads(settings_, threads, buffers, [&](std::uint64_t n, std::byte* load) {
      mark(load, settings_.load(), n);
      return writer.write(0, n * settings_.load(), {load, settings_.load()});
    });
    const ContentSummary summary = need(writer.finish(progress, interrupt));
    const double write = since(start).count();
    const auto read = [&](bool verify) {
      const auto reader = need(ContentReader::open(dir, summary.record, {direct}));
      if (!verify) {
        return rate(in_threads(settings_, threads, buffers, [&](std::uint64_t n, std::byte* load) {
          return reader.read(0, n * settings_.load(), {load, settings_.load()});
        }));
      }
      const auto begin = Clock::now();
      need(reader.verify_all(progress, interrupt));
      return rate(since(begin).count());
    };
    const double warm = read(false);
    const double verify = read(true);
    forget(form + "/gpu");
    const double cold = read(false);
    forget(form + "/gpu");
    const double cold_verify = read(true);
    std::filesystem::remove_all(form);
    const double stored =
        static_cast<double>(summary.use.stored_bytes) / static_cast<double>(summary.use.bytes);
    if (!settings_.as_json) {
      std::printf("%-8s %7u %7u %9s %6s | %8.2f %8.2f %8.2f %8.2f %8.2f | %6.3f\n", content.c_str(),
                  threads, chunk_kib, compression.c_str(),
                  !direct             ? "no"
                  : summary.direct_io ? "yes"
                                      : "cannot",
                  rate(write), warm, verify, cold, cold_verify, stored);
      std::fflush(stdout);
    }
    return {{"content", content},
            {"threads", threads},
            {"chunk_kib", chunk_kib},
            {"compress", compression},
            {"direct", summary.direct_io},
            {"write", rate(write)},
            {"read", warm},
            {"verify", verify},
            {"cold_read", cold},
            {"cold_verify", cold_verify},
            {"stored", stored}};
  }

  Settings settings_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("How fast GPU content goes into an image and comes out of it");
  app.add_option("DIR", settings.dir, "where to write")->required();
  app.add_option("--gib", settings.gib, "content [2]");
  app.add_option("--load", settings.load_kib, "KiB of one write or read [2048]");
  app.add_option("--threads", settings.threads)->delimiter(',');
  app.add_option("--chunk", settings.chunks_kib, "KiB")->delimiter(',');
  app.add_option("--compress", settings.compressions, "none, lz4, zstd")->delimiter(',');
  app.add_option("--content", settings.contents, "random, weights, text")->delimiter(',');
  app.add_option("--direct", settings.direct, "false, true: past the page cache")->delimiter(',');
  app.add_option("--rounds", settings.rounds);
  app.add_flag("--sync", settings.sync, "until it is on the disk");
  app.add_flag("--dd", settings.dd, "dd beside it");
  app.add_flag("--json", settings.as_json);
  CLI11_PARSE(app, argc, argv);
  for (const std::uint32_t chunk : settings.chunks_kib)
    if (chunk == 0 || settings.load_kib % chunk != 0) die("a load must be of whole chunks");
  return Bench(std::move(settings)).run();
}
