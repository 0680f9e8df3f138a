// Errors as values: a closed list of codes, what happened, and what to do about it.
//
// An Error owns its strings and may be copied and sent between threads. Nothing in the library
// prints an Error; src/cli and compat do.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/obstacle.h"

namespace stasis {

// The closed list, in the order of stasis_code, which has STASIS_OK before it. A new code comes
// last and needs a row in the catalogue (src/base/error.cc), from which docs/errors.md is made.
enum class ErrorCode {
  kUsage,              // the command line or the arguments are malformed
  kInterrupted,        // a signal asked us to stop; everything was rolled back
  kInternal,           // a bug in Stasis, or an impossible answer
  kIo,                 // a system call on a file failed
  kNoSpace,            // the disk is full
  kNoSuchProcess,      // there is no such process
  kProcessGone,        // it was there and is not any more, or its number means another one now
  kZombie,             // it has exited and waits for its parent
  kThreadId,           // the number is a thread's, not a process's
  kNotCuda,            // a living process that does not use CUDA
  kNotPermitted,       // the kernel or the driver refuses this user
  kWrongState,         // the operation is not possible in the CUDA state the process is in
  kFailedState,        // the driver says that the process's CUDA state has failed
  kTimeout,            // a deadline passed; the target is as it was
  kNoAnswer,           // the driver did not answer about a process; the call was given up
  kBusy,               // another operation holds the target
  kDriverMissing,      // libcuda.so.1 cannot be loaded
  kDriverTooOld,       // older than 570
  kDriverUnsupported,  // the driver lacks an entry point that is needed
  kDriverError,        // the driver refused, and none of the codes above fits
  kNotSupported,       // the driver cannot do this with this process (managed memory, ...)
  kDeviceMapUnsupported,
  kDeviceMapInvalid,  // the GPU map cannot be completed to what the driver demands
  kGpuMismatch,       // the GPUs here cannot hold the memory of the image
  kOutOfGpuMemory,
  kOutOfHostMemory,
  kCriuMissing,
  kCriuTooOld,
  kCriuFailed,
  kUndumpable,  // CRIU cannot dump something that the process has open or maps
  kImageExists,
  kImageIncomplete,  // no manifest: a dump did not finish
  kImageCorrupt,     // it does not match its manifest, or the manifest is damaged
  kImageVersion,     // written by a newer Stasis
  kPidInUse,         // a process number that the image needs is taken
  kNotRolledBack,    // something failed and the target could not be brought back by itself
};

// The name of a code as it stands in JSON output and in docs/errors.md, e.g. "wrong-state".
std::string_view error_code_name(ErrorCode code);

// The exit status of a program that ends because of this error; docs/errors.md lists them.
int exit_status(ErrorCode code);

// All about a code that is true wherever it occurs. The texts live as long as the program.
struct ErrorInfo {
  ErrorCode code;
  std::string_view name;
  int exit_status;
  std::string_view meaning;
  std::string_view causes;  // usual ones; may be empty
  std::string_view remedy;  // may be empty
};

// One entry for each code, in the order of the enum but for what belongs together.
std::span<const ErrorInfo> error_catalogue();

// What the driver itself answered.
struct DriverFailure {
  int number = 0;    // the CUresult, e.g. 401
  std::string name;  // its name, e.g. "CUDA_ERROR_ILLEGAL_STATE"
  std::string text;  // the driver's own words, from cuGetErrorString
};

// What may succeed after an error by which all is as it was before.
enum class Retry {
  kNone,
  kSame,       // what was in the way is gone
  kCopyFirst,  // with GPU memory copied before the driver is asked
  kByDriver,   // with GPU memory left to the driver
};

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;      // what happened, with the value seen; no final full stop
  std::string remedy = {};  // what to do; empty if there is nothing to say
  std::optional<DriverFailure> driver = {};
  std::vector<std::string> context = {};  // outermost last: "while dumping process 12"
  std::vector<Obstacle> obstacles = {};   // for programs; the message has them for people
  Retry retry = Retry::kNone;             // read by the operation alone that may try again

  // The same error, with one more "while ..." around it.
  Error within(std::string what) &&;

  // message and context on one line, without the remedy.
  std::string to_string() const;
};

// Of one obstacle, with what it is, what to do, and the option that overrides it.
Error refusal(Obstacle obstacle, ErrorCode code = ErrorCode::kNotSupported);

}  // namespace stasis
