// The command line of cuda-checkpoint, read as NVIDIA's utility reads it: by getopt_long, with the
// same options, the same order of checks and the same words of refusal.
//
// Pure but for getopt's own line, which getopt itself prints to standard error. Not thread-safe:
// getopt keeps its place in globals.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/cuda_state.h"
#include "base/ids.h"
#include "base/result.h"
#include "checkpoint/process.h"

namespace stasis::compat {

enum class Operation { kHelp, kGetState, kGetRestoreTid, kAction, kToggle, kLaunchJob };

// Options that NVIDIA's utility only knows where the driver can do what they ask for.
struct Features {
  bool device_map = true;  // --device-map: driver 580 and newer
  bool jobs = true;        // --launch-job: driver 590 and newer
};

struct Options {
  Operation operation = Operation::kHelp;
  std::string pid_text;  // as it was given, for messages
  // Nothing if the number is larger than any process number can be: there is no such process.
  // NVIDIA's utility cuts such a number down to 32 bits and acts on another process.
  std::optional<Pid> pid;
  Action action = Action::kLock;             // of kAction
  std::chrono::milliseconds timeout{0};      // of the lock; zero waits for ever
  std::optional<std::vector<GpuPair>> gpus;  // of the restore, exactly as given
  std::vector<std::string> job;              // of kLaunchJob: the program and its arguments
};

// kUsage with the refusal's first line as its message. An unknown option, or one that `features`
// lacks, is first named by getopt on standard error.
Result<Options> parse_options(int argc, char** argv, const Features& features = {});

}  // namespace stasis::compat
