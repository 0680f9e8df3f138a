#include "driver/driver_errors.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "proc/descriptors.h"

namespace stasis {
namespace {

constexpr int kOperatingSystem = 304;
constexpr int kCuNotPermitted = 800;

using enum ErrorCode;

// In the order in which they are tried. The last fits all.
constexpr int kAnyNumber = 0;
constexpr std::array kAnswers = {
    DriverAnswer{3, std::nullopt, kNotCuda, "process {pid} does not use CUDA",
                 "give a process that has initialised CUDA; `stasis ps` lists them"},
    DriverAnswer{401, std::nullopt, kWrongState,
                 "process {pid} is in a state that does not allow {action}",
                 "ask for it with `stasis ps`; `stasis recover {pid}` makes it run again"},
    DriverAnswer{600, std::nullopt, kTimeout,
                 "process {pid} did not finish its GPU work in time; it runs on",
                 "give it more time (--timeout), or try when fewer kernels are in flight"},
    DriverAnswer{2, Action::kCheckpoint, kOutOfHostMemory,
                 "not enough host memory to take up the GPU memory of process {pid}",
                 "free some memory on the host, add swap, or raise the limit of its cgroup"},
    DriverAnswer{2, std::nullopt, kOutOfGpuMemory, "not enough GPU memory for process {pid}",
                 "free GPU memory (nvidia-smi shows who uses it), then `stasis recover {pid}`"},
    DriverAnswer{1, Action::kRestore, kDeviceMapInvalid,
                 "the driver refused the GPU map for process {pid}",
                 "it must name every GPU that the driver sees, one to one; the process is still "
                 "checkpointed and can be restored without a map"},
    DriverAnswer{801, Action::kCheckpoint, kNotSupported,
                 "the driver cannot checkpoint process {pid}",
                 "usual causes: managed memory (cudaMallocManaged), MPS, MIG or a CUPTI tool; "
                 "unlocked, the process runs on unharmed"},
    DriverAnswer{801, std::nullopt, kNotSupported, "the driver cannot {action} process {pid}",
                 "usual causes: GPU memory that is shared between processes (CUDA IPC, NCCL's P2P "
                 "or shared-memory transports); a profiler or debugger that is or has been at work "
                 "in it (CUPTI, as by torch.profiler; cuda-gdb)"},
    DriverAnswer{999, Action::kCheckpoint, kNotSupported,
                 "the driver cannot checkpoint process {pid}",
                 "it gives no reason, as driver 580 does for a process that it has refused before: "
                 "usual causes are managed memory (cudaMallocManaged), MPS, MIG or a CUPTI tool"},
    DriverAnswer{800, std::nullopt, kNotPermitted,
                 "the driver does not permit {action} on process {pid}",
                 "switch persistence mode on (nvidia-smi -pm 1) and run as root"},
    DriverAnswer{100, std::nullopt, kGpuMismatch, "the driver sees no GPU here",
                 "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices"},
    DriverAnswer{803, std::nullopt, kDriverUnsupported,
                 "the driver's library and its kernel module are of different versions",
                 "reboot, or load the kernel module that belongs to the installed driver"},
    DriverAnswer{kDriverNoAnswer, std::nullopt, kNoAnswer,
                 "the driver does not answer {action} for process {pid}",
                 "see what process {pid} hangs in (`ps -L {pid}`, `dmesg`), and whether another "
                 "tool acts on it; give it more time with --driver-timeout; `stasis recover {pid}` "
                 "makes it run when it answers again"},
    DriverAnswer{kDriverCallLost, std::nullopt, kDriverError,
                 "{action} of process {pid} was cut short",
                 "see `dmesg`: out of memory, or a crash in the driver's library"},
    DriverAnswer{kOperatingSystem, std::nullopt, kDriverError,
                 "the driver could not {action} process {pid}, which is alive and may be traced",
                 "usual causes: the process crashed in the driver or ran out of memory in an "
                 "earlier restore, it is stopped or traced, or it runs another version of the "
                 "driver's library (a container)"},
    DriverAnswer{kAnyNumber, std::nullopt, kDriverError,
                 "the driver could not {action} process {pid}",
                 "see `dmesg` for messages of the NVIDIA driver"},
};

// What /proc says about a process the driver could not work with; nothing if it looks sound, or if
// /proc could not be asked.
std::optional<Error> probe_process(Pid pid, const proc::ProcFs& procfs) {
  auto info = procfs.process(pid);
  if (!info) {
    const ErrorCode code = info.error().code;
    if (code != ErrorCode::kNoSuchProcess && code != ErrorCode::kThreadId) return std::nullopt;
    return std::move(info.error());
  }
  if (info->has_ended()) return procfs.ended_error(*info);
  if (!proc::may_trace(pid)) {
    return refusal({"permissions", Severity::kRed, pid,
                    fmt::format("not permitted to act on process {} ({})", pid.value, info->comm),
                    "run as root or with CAP_SYS_PTRACE; as the same user it also needs "
                    "/proc/sys/kernel/yama/ptrace_scope to be 0"},
                   ErrorCode::kNotPermitted);
  }
  return std::nullopt;
}

Error diagnose(int number, Action action, Pid pid, const proc::ProcFs& procfs) {
  if (auto found = probe_process(pid, procfs)) {
    // A living process that may not be traced still answers e.g. a time-out for what it is.
    const bool permission = found->code == ErrorCode::kNotPermitted;
    if (!permission || number == kOperatingSystem || number == kCuNotPermitted) return *found;
  }
  if (number == kOperatingSystem) {
    const auto descriptors = proc::descriptor_limit(pid);
    if (descriptors && descriptors->spare == 0) {
      return {ErrorCode::kDriverError,
              fmt::format("process {} has all {} descriptors open that it may have, and its driver "
                          "can do nothing without one",
                          pid.value, descriptors->limit),
              fmt::format("raise its limit of open files ({}), or let it close some",
                          proc::raise_command(pid, *descriptors))};
    }
  }
  const auto answers = driver_answers();
  const auto fits = [&](const DriverAnswer& answer) {
    return (answer.number == number || answer.number == kAnyNumber) &&
           (!answer.action || *answer.action == action);
  };
  const DriverAnswer& answer = *std::find_if(answers.begin(), answers.end(), fits);
  const auto text = [&](std::string_view form) {
    return fmt::format(fmt::runtime(form), fmt::arg("pid", pid.value),
                       fmt::arg("action", action_name(action)));
  };
  return {answer.code, text(answer.meaning), text(answer.remedy)};
}

}  // namespace

std::span<const DriverAnswer> driver_answers() { return kAnswers; }

Error explain_driver_failure(const DriverFailure& failure, Action action, Pid pid,
                             const proc::ProcFs& procfs) {
  Error error = diagnose(failure.number, action, pid, procfs);
  if (failure.number < 0) {  // not the driver's words
    error.message += ": " + failure.text;
    return error;
  }
  error.message +=
      fmt::format(" (driver: {} {}, \"{}\")", failure.name, failure.number, failure.text);
  error.driver = failure;
  return error;
}

}  // namespace stasis
