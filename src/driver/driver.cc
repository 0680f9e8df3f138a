#include "driver/driver.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

#include <fmt/format.h>

#include "abi/cuda_abi.h"
#include "base/trace.h"
#include "driver/library.h"
#include "driver/nvml.h"

namespace stasis {
namespace {

namespace fn = cuda::fn;
using cuda::CUresult;

// Driver 570 has CUDA 12.8 and is the first with all six calls; 580 has 13.0 and is the first with
// GPU pairs; 590 (13.1) is the first whose own utility can launch jobs.
constexpr int kOldestCuda = 12080;
constexpr int kDeviceMapCuda = 13000;
constexpr int kJobsCuda = 13010;

constexpr const char* kUpgrade =
    "install NVIDIA driver 570 or newer (580 to move a process to other GPUs)";

struct Calls {
  fn::cuInit* init = nullptr;
  fn::cuGetErrorName* error_name = nullptr;
  fn::cuGetErrorString* error_text = nullptr;
  fn::cuCheckpointProcessGetState* state = nullptr;
  fn::cuCheckpointProcessGetRestoreThreadId* restore_thread_id = nullptr;
  fn::cuCheckpointProcessLock* lock = nullptr;
  fn::cuCheckpointProcessCheckpoint* checkpoint = nullptr;
  fn::cuCheckpointProcessRestore* restore = nullptr;
  fn::cuCheckpointProcessUnlock* unlock = nullptr;
};

// The first try of a lock without a limit; each further one takes twice as long. A call that cannot
// be ended is answered after at most as long again as it has waited already, and work that needs
// long to finish still gets the time it needs.
constexpr std::chrono::milliseconds kFirstLockTry{500};
constexpr std::chrono::milliseconds kLongestLockTry{1U << 30U};

class LibcudaDriver final : public Driver {
 public:
  LibcudaDriver(Library library, Calls calls, DriverInfo info, bool nvml_beside)
      : library_(std::move(library)),
        calls_(calls),
        info_(std::move(info)),
        nvml_beside_(nvml_beside) {}

  const DriverInfo& info() const override { return info_; }

  DriverResult<CudaState> state(Pid pid) override {
    cuda::CUprocessState state{};
    if (auto code = calls_.state(pid.value, &state); code != cuda::CUDA_SUCCESS) {
      return failure(code);
    }
    if (static_cast<unsigned>(state) > static_cast<unsigned>(CudaState::kFailed)) {
      return failure(cuda::CUDA_ERROR_UNKNOWN);
    }
    return static_cast<CudaState>(state);
  }

  DriverResult<Tid> restore_thread_id(Pid pid) override {
    int tid = 0;
    if (auto code = calls_.restore_thread_id(pid.value, &tid); code != cuda::CUDA_SUCCESS) {
      return failure(code);
    }
    return Tid{tid};
  }

  DriverResult<void> lock(Pid pid, std::chrono::milliseconds timeout) override {
    cuda::CUcheckpointLockArgs args{};
    // Never by accident 0, which waits for ever.
    if (timeout.count() != 0) {
      args.timeoutMs = static_cast<unsigned>(
          std::clamp<std::int64_t>(timeout.count(), 1, std::numeric_limits<std::uint32_t>::max()));
    }
    return result(calls_.lock(pid.value, &args));
  }

  DriverResult<void> checkpoint(Pid pid) override {
    cuda::CUcheckpointCheckpointArgs args{};
    return result(calls_.checkpoint(pid.value, &args));
  }

  void prepare_restore() override {
    // Its own failure does not matter: where persistence mode is on, restore works without.
    std::call_once(initialised_, [this] { (void)calls_.init(0); });
  }

  DriverResult<void> restore(Pid pid, std::span<const GpuPair> pairs) override {
    prepare_restore();
    std::vector<cuda::CUcheckpointGpuPair> raw(pairs.size());
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      std::memcpy(&raw[i].oldUuid, pairs[i].from.bytes.data(), sizeof raw[i].oldUuid);
      std::memcpy(&raw[i].newUuid, pairs[i].to.bytes.data(), sizeof raw[i].newUuid);
    }
    cuda::CUcheckpointRestoreArgs args{};
    if (!raw.empty()) {
      args.gpuPairs = raw.data();
      args.gpuPairsCount = static_cast<unsigned>(raw.size());
    }
    return result(calls_.restore(pid.value, &args));
  }

  DriverResult<void> unlock(Pid pid) override {
    cuda::CUcheckpointUnlockArgs args{};
    return result(calls_.unlock(pid.value, &args));
  }

  DriverFailure describe(int cu_result) const override {
    DriverFailure out;
    out.number = cu_result;
    const char* text = nullptr;
    const auto code = static_cast<CUresult>(cu_result);
    if (calls_.error_name(code, &text) == cuda::CUDA_SUCCESS && text != nullptr) out.name = text;
    text = nullptr;
    if (calls_.error_text(code, &text) == cuda::CUDA_SUCCESS && text != nullptr) out.text = text;
    if (out.name.empty()) out.name = fmt::format("CUresult {}", cu_result);
    if (out.text.empty()) out.text = "unknown error";
    return out;
  }

  Result<std::vector<Gpu>> gpus() override {
    STASIS_TRY_ASSIGN(auto loaded, nvml());
    return loaded->gpus();
  }

  Result<std::map<Pid, std::vector<GpuUse>>> memory_by_process() override {
    STASIS_TRY_ASSIGN(auto loaded, nvml());
    return loaded->memory_by_process();
  }

 private:
  tl::unexpected<DriverFailure> failure(CUresult code) const {
    return tl::unexpected<DriverFailure>(describe(static_cast<int>(code)));
  }
  DriverResult<void> result(CUresult code) const {
    if (code != cuda::CUDA_SUCCESS) return failure(code);
    return {};
  }

  // Loaded when first needed: it costs some 10 ms and a state query does not need it.
  Result<Nvml*> nvml() {
    const std::scoped_lock lock(nvml_mutex_);
    if (!nvml_) {
      const Span span(TraceKind::kDriver, "start NVML");
      STASIS_TRY_ASSIGN(auto loaded, Nvml::load(library_.path(), nvml_beside_));
      nvml_ = std::move(loaded);
    }
    return nvml_.get();
  }

  Library library_;
  Calls calls_;
  DriverInfo info_;
  bool nvml_beside_;
  std::once_flag initialised_;
  std::mutex nvml_mutex_;
  std::unique_ptr<Nvml> nvml_;
};

// The checkpoint calls through cuGetProcAddress, which knows what this version really has, and by
// plain symbol where that fails.
template <class Function>
bool find(const Library& library, const char* name, Function*& out) {
  void* address = nullptr;
  if (auto* lookup = library.function<fn::cuGetProcAddress_v2>("cuGetProcAddress_v2")) {
    cuda::CUdriverProcAddressQueryResult status{};
    if (lookup(name, &address, kOldestCuda, cuda::CU_GET_PROC_ADDRESS_DEFAULT, &status) !=
        cuda::CUDA_SUCCESS) {
      address = nullptr;
    }
  }
  if (address == nullptr) address = library.symbol(name);
  out = reinterpret_cast<Function*>(address);
  return out != nullptr;
}

// "NVRM version: NVIDIA UNIX ... Kernel Module  580.159.04  ..." : the first word that looks like a
// version. Much cheaper than NVML; absent where the kernel module is hidden (some containers).
std::string version_from_proc() {
  std::string text;
  if (std::FILE* file = std::fopen("/proc/driver/nvidia/version", "re")) {
    std::string line(512, '\0');
    if (std::fgets(line.data(), static_cast<int>(line.size()), file) != nullptr)
      text.assign(line, 0, line.find('\0'));  // up to its end, not its capacity
    std::fclose(file);
  }
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \t\n", begin), text.size());
    std::string word = text.substr(begin, end - begin);
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos) {
      return word;
    }
    begin = end + 1;
  }
  return {};
}

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

std::uint64_t total_bytes(std::span<const GpuUse> uses) {
  std::uint64_t sum = 0;
  for (const GpuUse& use : uses)
    sum += use.bytes;
  return sum;
}

DriverResult<void> Driver::lock_unless(Pid pid, std::chrono::milliseconds timeout,
                                       const Interrupt& interrupt) {
  for (std::chrono::milliseconds limit = kFirstLockTry;;
       limit = std::min(limit * 2, kLongestLockTry)) {
    if (interrupt.requested()) {
      return tl::unexpected<DriverFailure>(
          DriverFailure{kDriverInterrupted, "interrupted", "a stop was requested"});
    }
    if (timeout.count() > 0) return lock(pid, timeout);
    auto done = lock(pid, limit);
    if (done || done.error().number != cuda::CUDA_ERROR_NOT_READY) return done;
  }
}

std::string_view action_name(Action action) {
  switch (action) {
    case Action::kGetState:
      return "get-state";
    case Action::kGetRestoreThreadId:
      return "get-restore-tid";
    case Action::kLock:
      return "lock";
    case Action::kCheckpoint:
      return "checkpoint";
    case Action::kRestore:
      return "restore";
    case Action::kUnlock:
      return "unlock";
  }
  return "?";
}

std::uint64_t memory_of_all_gpus(Driver& driver) {
  const auto gpus = driver.gpus();
  if (!gpus || gpus->empty()) return std::numeric_limits<std::uint64_t>::max();
  std::uint64_t sum = 0;
  for (const Gpu& gpu : *gpus)
    sum += gpu.memory_total;
  return sum;
}

Result<std::unique_ptr<Driver>> load_driver(const std::string& library_name) {
  STASIS_TRY_ASSIGN(auto loaded, load_driver_library(library_name));
  Library* library = &loaded.library;
  auto* get_version = library->function<fn::cuDriverGetVersion>("cuDriverGetVersion");
  Calls calls;
  calls.init = library->function<fn::cuInit>("cuInit");
  calls.error_name = library->function<fn::cuGetErrorName>("cuGetErrorName");
  calls.error_text = library->function<fn::cuGetErrorString>("cuGetErrorString");
  if (get_version == nullptr || calls.init == nullptr || calls.error_name == nullptr ||
      calls.error_text == nullptr) {
    return fail(ErrorCode::kDriverUnsupported,
                fmt::format("{} is not a CUDA driver library", library->path()),
                "check the file that STASIS_LIBCUDA names");
  }
  DriverInfo info;
  info.library = library->path();
  info.simulated = library->symbol(cuda::kSimulatedMarkerSymbol) != nullptr;
  if (auto code = get_version(&info.cuda_version); code != cuda::CUDA_SUCCESS) {
    return fail(ErrorCode::kDriverUnsupported,
                fmt::format("{} does not tell its version (CUresult {})", library->path(),
                            static_cast<unsigned>(code)),
                "a stub library of the CUDA toolkit? install the driver itself");
  }
  if (info.cuda_version < kOldestCuda) {
    return fail(ErrorCode::kDriverTooOld,
                fmt::format("the driver supports CUDA {}, and checkpoints need CUDA 12.8 (driver "
                            "570) or newer",
                            cuda_version_text(info.cuda_version)),
                kUpgrade);
  }
  if (!info.simulated) info.driver_version = version_from_proc();
  if (info.simulated) {
    info.driver_version =
        fmt::format("simulated (as CUDA {})", cuda_version_text(info.cuda_version));
  }
  const bool complete =
      find(*library, "cuCheckpointProcessGetState", calls.state) &&
      find(*library, "cuCheckpointProcessGetRestoreThreadId", calls.restore_thread_id) &&
      find(*library, "cuCheckpointProcessLock", calls.lock) &&
      find(*library, "cuCheckpointProcessCheckpoint", calls.checkpoint) &&
      find(*library, "cuCheckpointProcessRestore", calls.restore) &&
      find(*library, "cuCheckpointProcessUnlock", calls.unlock);
  if (!complete) {
    return fail(ErrorCode::kDriverUnsupported,
                fmt::format("{} (CUDA {}) lacks the checkpoint calls", library->path(),
                            cuda_version_text(info.cuda_version)),
                kUpgrade);
  }
  info.has_device_map = info.cuda_version >= kDeviceMapCuda;
  info.has_jobs = info.cuda_version >= kJobsCuda;
  return std::unique_ptr<Driver>(
      new LibcudaDriver(std::move(*library), calls, std::move(info), loaded.named));
}

}  // namespace stasis
