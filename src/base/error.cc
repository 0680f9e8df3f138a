#include "stasis/error.h"

#include <array>

namespace stasis {
namespace {

struct Row {
  ErrorCode code;
  std::string_view name;
  int exit_status;
};

// Exit statuses group the codes by what a script can do about them: 2 fix the command line,
// 3 the process is not there, 4 it has no CUDA, 5 get permission, 6 wait for or mend its state,
// 7 try again, 8 driver, 9 CRIU, 10 the image, 11 make room, 12 run `stasis recover`.
constexpr std::array kRows = {
    Row{ErrorCode::kUsage, "usage", 2},
    Row{ErrorCode::kInterrupted, "interrupted", 130},
    Row{ErrorCode::kInternal, "internal", 1},
    Row{ErrorCode::kIo, "io", 1},
    Row{ErrorCode::kNoSpace, "no-space", 11},
    Row{ErrorCode::kNoSuchProcess, "no-such-process", 3},
    Row{ErrorCode::kProcessGone, "process-gone", 3},
    Row{ErrorCode::kZombie, "zombie", 3},
    Row{ErrorCode::kThreadId, "thread-id", 2},
    Row{ErrorCode::kNotCuda, "not-cuda", 4},
    Row{ErrorCode::kNotPermitted, "not-permitted", 5},
    Row{ErrorCode::kWrongState, "wrong-state", 6},
    Row{ErrorCode::kFailedState, "failed-state", 6},
    Row{ErrorCode::kTimeout, "timeout", 7},
    Row{ErrorCode::kNoAnswer, "no-answer", 7},
    Row{ErrorCode::kBusy, "busy", 7},
    Row{ErrorCode::kDriverMissing, "driver-missing", 8},
    Row{ErrorCode::kDriverTooOld, "driver-too-old", 8},
    Row{ErrorCode::kDriverUnsupported, "driver-unsupported", 8},
    Row{ErrorCode::kDriverError, "driver-error", 8},
    Row{ErrorCode::kNotSupported, "not-supported", 8},
    Row{ErrorCode::kDeviceMapUnsupported, "device-map-unsupported", 8},
    Row{ErrorCode::kDeviceMapInvalid, "device-map-invalid", 2},
    Row{ErrorCode::kGpuMismatch, "gpu-mismatch", 11},
    Row{ErrorCode::kOutOfGpuMemory, "out-of-gpu-memory", 11},
    Row{ErrorCode::kOutOfHostMemory, "out-of-host-memory", 11},
    Row{ErrorCode::kCriuMissing, "criu-missing", 9},
    Row{ErrorCode::kCriuTooOld, "criu-too-old", 9},
    Row{ErrorCode::kCriuFailed, "criu-failed", 9},
    Row{ErrorCode::kUndumpable, "undumpable", 9},
    Row{ErrorCode::kImageExists, "image-exists", 10},
    Row{ErrorCode::kImageIncomplete, "image-incomplete", 10},
    Row{ErrorCode::kImageCorrupt, "image-corrupt", 10},
    Row{ErrorCode::kImageVersion, "image-version", 10},
    Row{ErrorCode::kPidInUse, "pid-in-use", 11},
    Row{ErrorCode::kNotRolledBack, "not-rolled-back", 12},
};

const Row& row(ErrorCode code) {
  for (const Row& candidate : kRows) {
    if (candidate.code == code) return candidate;
  }
  return kRows[2];
}

}  // namespace

std::string_view error_code_name(ErrorCode code) { return row(code).name; }

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

}  // namespace stasis
