#include "base/error.h"

#include <array>

namespace stasis {
namespace {

// Exit statuses group the codes by what a script can do about them: 2 fix the command line,
// 3 the process is not there, 4 it has no CUDA, 5 get permission, 6 wait for or mend its state,
// 7 try again, 8 driver, 9 CRIU, 10 the image, 11 make room, 12 run `stasis recover`.
constexpr std::array kRows = {
    ErrorInfo{ErrorCode::kUsage, "usage", 2, "the command line or the arguments are malformed",
              "an unknown option, an invalid value, options that exclude each other",
              "see `--help`"},
    ErrorInfo{ErrorCode::kInterrupted, "interrupted", 130,
              "a signal stopped the operation; everything was rolled back",
              "SIGINT, SIGTERM, SIGHUP or SIGQUIT; the exit status is 128 and the signal's number",
              ""},
    ErrorInfo{ErrorCode::kInternal, "internal", 1, "a bug in Stasis, or an impossible answer", "",
              "report it, with the message"},
    ErrorInfo{ErrorCode::kIo, "io", 1,
              "a system call on a file failed; or the operation is done, but its result could not "
              "be written to standard output",
              "permissions, a broken disk, a limit on the size of files, a closed pipe",
              "see the message, which has the system's own words"},
    ErrorInfo{ErrorCode::kNoSpace, "no-space", 11, "the disk is full, or would be",
              "an image holds the memory of the processes and what was on their GPUs",
              "free space, or name another directory; the figures are in the message"},
    ErrorInfo{
        ErrorCode::kNoSuchProcess, "no-such-process", 3, "there is no process with this number",
        "it has ended, or has another number here (a container's PID namespace)", "`stasis ps`"},
    ErrorInfo{ErrorCode::kProcessGone, "process-gone", 3, "the process ended during the operation",
              "it finished, crashed, or was killed; with its number taken by another process since",
              "start it again, or restore it from an image"},
    ErrorInfo{ErrorCode::kZombie, "zombie", 3, "it has exited and waits for its parent", "",
              "start it again"},
    ErrorInfo{ErrorCode::kThreadId, "thread-id", 2, "the number is a thread's",
              "tools that list threads (`htop`, `top -H`, `ps -L`) show such numbers",
              "give the number of its process, which the message names"},
    ErrorInfo{ErrorCode::kNotCuda, "not-cuda", 4, "a living process that does not use CUDA",
              "it has not called cuInit yet, or its child does the GPU work",
              "`stasis ps` lists those that do"},
    ErrorInfo{
        ErrorCode::kNotPermitted, "not-permitted", 5, "the kernel or the driver refuses this user",
        "a process of another user, yama, a container without CAP_SYS_PTRACE; persistence mode off",
        "run as root or with CAP_SYS_PTRACE; `stasis doctor` tells what is missing"},
    ErrorInfo{ErrorCode::kWrongState, "wrong-state", 6,
              "the CUDA state of the process does not allow it",
              "an operation that was cut short, or another tool that acts on the process",
              "`stasis recover PID` makes it run again"},
    ErrorInfo{ErrorCode::kFailedState, "failed-state", 6,
              "the driver has given the CUDA state of the process up",
              "a failed restore, or a GPU error (see dmesg for Xid)",
              "end it and restore it from an image"},
    ErrorInfo{ErrorCode::kTimeout, "timeout", 7,
              "GPU work, or CRIU, did not end in time; nothing has changed",
              "long kernels, ranks that wait for each other",
              "a longer `--timeout`, or another moment"},
    ErrorInfo{ErrorCode::kNoAnswer, "no-answer", 7,
              "the driver did not answer about a process in time, and the call was given up; the "
              "process is as it was",
              "a hanging driver, a process in an uninterruptible state",
              "see what it hangs in; a longer `--driver-timeout`"},
    ErrorInfo{
        ErrorCode::kBusy, "busy", 7,
        "another operation works on the target, or it is in a state that passes",
        "another stasis, a debugger, a process that is stopped (Ctrl-Z), a connection that is "
        "just being opened",
        "wait for it, end the debugger, let the process go on"},
    ErrorInfo{
        ErrorCode::kDriverMissing, "driver-missing", 8, "libcuda.so.1 (or NVML) cannot be loaded",
        "no NVIDIA driver, or a container without its libraries",
        "install the driver, or set `STASIS_LIBCUDA`; to try Stasis without a GPU, the package "
        "`stasis-simulator`"},
    ErrorInfo{ErrorCode::kDriverTooOld, "driver-too-old", 8, "the driver is older than 570", "",
              "install 570 or newer"},
    ErrorInfo{ErrorCode::kDriverUnsupported, "driver-unsupported", 8,
              "the driver lacks what is needed, or is another version than the image's",
              "an image of another driver version; a driver that was updated and not yet loaded",
              "use the version that the message names"},
    ErrorInfo{ErrorCode::kDriverError, "driver-error", 8,
              "the driver refused for a reason it does not give",
              "see the table of the driver's answers",
              "the message has its answer and the usual causes"},
    ErrorInfo{ErrorCode::kNotSupported, "not-supported", 8,
              "the driver cannot do this with this process",
              "managed memory, GPU memory shared with a process outside the tree or without the "
              "agent, NVLink multicast, MPS, MIG",
              "see the message"},
    ErrorInfo{ErrorCode::kDeviceMapUnsupported, "device-map-unsupported", 8,
              "the driver cannot move a process to other GPUs", "a driver older than 580",
              "driver 580 or newer"},
    ErrorInfo{ErrorCode::kDeviceMapInvalid, "device-map-invalid", 2,
              "the GPU map is ill-formed, names an unknown GPU, or one twice", "",
              "OLD=NEW,...: each a UUID, an index or a PCI address of a GPU that there is"},
    ErrorInfo{ErrorCode::kGpuMismatch, "gpu-mismatch", 11,
              "the GPUs here cannot hold the memory of the image",
              "other models, fewer GPUs, `CUDA_VISIBLE_DEVICES`; the simulated GPU, or a real one",
              "`--device-map`, or another machine"},
    ErrorInfo{ErrorCode::kOutOfGpuMemory, "out-of-gpu-memory", 11,
              "the GPU has not enough free memory", "another process took it meanwhile",
              "free some, or `--device-map`"},
    ErrorInfo{ErrorCode::kOutOfHostMemory, "out-of-host-memory", 11,
              "the host, or the memory cgroup of the container or job, has not enough free memory "
              "for the GPU's content",
              "GPU memory is kept in the process's own memory while its GPU is free",
              "free some, or raise the limit"},
    ErrorInfo{ErrorCode::kCriuMissing, "criu-missing", 9, "no usable criu was found", "",
              "`stasis-get-criu` (in the source `tools/get-criu`), or `STASIS_CRIU`"},
    ErrorInfo{ErrorCode::kCriuTooOld, "criu-too-old", 9, "criu is older than 4.0", "",
              "`stasis-get-criu` (in the source `tools/get-criu`)"},
    ErrorInfo{ErrorCode::kCriuFailed, "criu-failed", 9,
              "CRIU refused or failed; its own lines and what they mean are in the message",
              "see the table of CRIU's lines", "the hint in the message; the full log is named"},
    ErrorInfo{
        ErrorCode::kUndumpable, "undumpable", 9,
        "a process has something that CRIU cannot dump, or that a restore would take from it; it "
        "runs on "
        "as it was",
        "io_uring, devices, connections to the outside, shared memory of System V, another tracer",
        "as the message says; `stasis doctor PID` shows all of it; `--ignore-obstacles` lets CRIU "
        "try"},
    ErrorInfo{ErrorCode::kImageExists, "image-exists", 10, "the image directory exists", "",
              "another directory, or `--force`"},
    ErrorInfo{ErrorCode::kImageIncomplete, "image-incomplete", 10,
              "there is no complete image there",
              "a dump that was killed, a copy that was cut short, a wrong directory",
              "the message names what is left of a dump"},
    ErrorInfo{ErrorCode::kImageCorrupt, "image-corrupt", 10,
              "the image is damaged: it does not match its manifest, or has none that can be read",
              "a damaged disk or copy; a file of it was changed", "restore an older image"},
    ErrorInfo{ErrorCode::kImageVersion, "image-version", 10,
              "the image was written by a newer Stasis", "", "use that version"},
    ErrorInfo{ErrorCode::kPidInUse, "pid-in-use", 11,
              "a process number that the image needs is taken",
              "the job still runs, or another process has its number",
              "end what uses it, or use a PID namespace"},
    ErrorInfo{ErrorCode::kNotRolledBack, "not-rolled-back", 12,
              "something failed and a process is not back in its state, or something is left over",
              "a second failure on the way back",
              "the command in the message, usually `stasis recover PID`"},
};

const ErrorInfo& row(ErrorCode code) {
  for (const ErrorInfo& candidate : kRows) {
    if (candidate.code == code) return candidate;
  }
  return kRows[2];
}

}  // namespace

std::string_view error_code_name(ErrorCode code) { return row(code).name; }

std::span<const ErrorInfo> error_catalogue() { return kRows; }

int exit_status(ErrorCode code) { return row(code).exit_status; }

Error Error::within(std::string what) && {
  context.push_back(std::move(what));
  return std::move(*this);
}

std::string Error::to_string() const {
  std::string out = message;
  for (const std::string& outer : context)
    out += " (" + outer + ")";
  return out;
}

Error refusal(Obstacle obstacle, ErrorCode code) {
  Error error{code, obstacle.what, obstacle.remedy};
  const auto option = option_of(obstacle.by);
  if (!option.empty() && error.remedy.find(option) == std::string::npos)
    error.remedy.append("; if you know better: ").append(option);
  error.obstacles.push_back(std::move(obstacle));
  return error;
}

}  // namespace stasis
