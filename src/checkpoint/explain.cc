#include "checkpoint/explain.h"

#include <fmt/format.h>

namespace stasis {
namespace {

// The CUresults that mean something to us.
enum CuResult {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kOperatingSystem = 304,
  kIllegalState = 401,
  kNotReady = 600,
  kCuNotPermitted = 800,
  kCuNotSupported = 801,
  kSystemDriverMismatch = 803,
  kUnknown = 999,
};

struct Diagnosis {
  ErrorCode code;
  std::string why;
  std::string remedy;
};

// What /proc says about a process the driver could not work with; nothing if it looks sound, or if
// /proc could not be asked.
std::optional<Diagnosis> look_at_process(Pid pid, const proc::ProcFs& procfs) {
  auto info = procfs.process(pid);
  if (!info) {
    const ErrorCode code = info.error().code;
    if (code != ErrorCode::kNoSuchProcess && code != ErrorCode::kThreadId) return std::nullopt;
    return Diagnosis{code, info.error().message, info.error().remedy};
  }
  if (info->state == 'Z' || info->state == 'X') {
    return Diagnosis{
        ErrorCode::kZombie,
        fmt::format("process {} ({}) has exited and waits for its parent", pid.value, info->comm),
        "nothing can be done with it; start the program again"};
  }
  if (!proc::may_trace(pid)) {
    return Diagnosis{ErrorCode::kNotPermitted,
                     fmt::format("not permitted to act on process {} ({})", pid.value, info->comm),
                     "run as root or with CAP_SYS_PTRACE; as the same user it also needs "
                     "/proc/sys/kernel/yama/ptrace_scope to be 0"};
  }
  return std::nullopt;
}

Diagnosis diagnose(int number, Action action, Pid pid, const proc::ProcFs& procfs) {
  if (auto found = look_at_process(pid, procfs)) {
    // A living process that may not be traced still answers e.g. a time-out for what it is.
    const bool permission = found->code == ErrorCode::kNotPermitted;
    if (!permission || number == kOperatingSystem || number == kCuNotPermitted) return *found;
  }
  switch (number) {
    case kNotInitialized:
      return {ErrorCode::kNotCuda, fmt::format("process {} does not use CUDA", pid.value),
              "give a process that has initialised CUDA; `stasis ps` lists them"};
    case kIllegalState:
      return {ErrorCode::kWrongState,
              fmt::format("process {} is in a state that does not allow {}", pid.value,
                          action_name(action)),
              fmt::format("ask for it with `stasis ps`; `stasis recover {}` makes it run again",
                          pid.value)};
    case kNotReady:
      return {ErrorCode::kTimeout,
              fmt::format("process {} did not finish its GPU work in time; it runs on", pid.value),
              "give it more time (--timeout), or try when fewer kernels are in flight"};
    case kOutOfMemory:
      if (action == Action::kCheckpoint) {
        return {ErrorCode::kOutOfHostMemory,
                fmt::format("not enough host memory to take up the GPU memory of process {}",
                            pid.value),
                "free some memory on the host, add swap, or raise the limit of its cgroup"};
      }
      return {
          ErrorCode::kOutOfGpuMemory,
          fmt::format("not enough GPU memory for process {}", pid.value),
          fmt::format("free GPU memory (nvidia-smi shows who uses it), then `stasis recover {}`",
                      pid.value)};
    case kInvalidValue:
      if (action != Action::kRestore) break;
      return {ErrorCode::kDeviceMapInvalid,
              fmt::format("the driver refused the GPU map for process {}", pid.value),
              "it must name every GPU that the driver sees, one to one; the process is still "
              "checkpointed and can be restored without a map"};
    case kCuNotSupported:
      if (action == Action::kCheckpoint) {
        return {ErrorCode::kNotSupported,
                fmt::format("the driver cannot checkpoint process {}", pid.value),
                "usual causes: managed memory (cudaMallocManaged), MPS, MIG or a CUPTI tool; "
                "unlocked, the process runs on unharmed"};
      }
      return {ErrorCode::kNotSupported,
              fmt::format("the driver cannot {} process {}", action_name(action), pid.value),
              "usual cause: GPU memory that is shared between processes (CUDA IPC, NCCL's P2P or "
              "shared-memory transports)"};
    case kUnknown:
      if (action != Action::kCheckpoint) break;
      return {ErrorCode::kNotSupported,
              fmt::format("the driver cannot checkpoint process {}", pid.value),
              "it gives no reason, as driver 580 does for a process that it has refused before: "
              "usual causes are managed memory (cudaMallocManaged), MPS, MIG or a CUPTI tool"};
    case kCuNotPermitted:
      return {ErrorCode::kNotPermitted,
              fmt::format("the driver does not permit {} on process {}", action_name(action),
                          pid.value),
              "switch persistence mode on (nvidia-smi -pm 1) and run as root"};
    case kNoDevice:
      return {ErrorCode::kGpuMismatch, "the driver sees no GPU here",
              "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices"};
    case kSystemDriverMismatch:
      return {ErrorCode::kDriverUnsupported,
              "the driver's library and its kernel module are of different versions",
              "reboot, or load the kernel module that belongs to the installed driver"};
    case kDriverNoAnswer:
      return {ErrorCode::kNoAnswer,
              fmt::format("the driver does not answer {} for process {}", action_name(action),
                          pid.value),
              fmt::format("see what process {0} hangs in (`ps -L {0}`, `dmesg`), and whether "
                          "another tool acts on it; give it more time with --driver-timeout; "
                          "`stasis recover {0}` makes it run when it answers again",
                          pid.value)};
    case kDriverCallLost:
      return {ErrorCode::kDriverError,
              fmt::format("{} of process {} was cut short", action_name(action), pid.value),
              "see `dmesg`: out of memory, or a crash in the driver's library"};
    case kOperatingSystem:
      return {ErrorCode::kDriverError,
              fmt::format("the driver could not {} process {}, which is alive and may be traced",
                          action_name(action), pid.value),
              "usual causes: the process crashed in the driver or ran out of memory in an earlier "
              "restore, it is stopped or traced, or it runs another version of the driver's "
              "library (a container)"};
    default:
      break;
  }
  return {ErrorCode::kDriverError,
          fmt::format("the driver could not {} process {}", action_name(action), pid.value),
          "see `dmesg` for messages of the NVIDIA driver"};
}

}  // namespace

Error explain_driver_failure(const DriverFailure& failure, Action action, Pid pid,
                             const proc::ProcFs& procfs) {
  Diagnosis diagnosis = diagnose(failure.number, action, pid, procfs);
  Error error;
  error.code = diagnosis.code;
  error.remedy = std::move(diagnosis.remedy);
  if (failure.number < 0) {  // not the driver's words
    error.message = fmt::format("{}: {}", diagnosis.why, failure.text);
    return error;
  }
  error.message = fmt::format("{} (driver: {} {}, \"{}\")", diagnosis.why, failure.name,
                              failure.number, failure.text);
  error.driver = failure;
  return error;
}

}  // namespace stasis
