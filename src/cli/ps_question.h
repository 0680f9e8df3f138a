// What `stasis ps` asks the driver about one process. Private to src/cli.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "base/cuda_state.h"
#include "base/result.h"
#include "base/units.h"
#include "checkpoint/process.h"

namespace stasis::cli {

// Asked on a thread that is left behind if there is no answer in time: what is at work on a process
// keeps every tool waiting that asks about it (driver 580).
struct Question {
  explicit Question(Process about) : process(std::move(about)) {}

  static void ask(const std::shared_ptr<Question>& question);
  // Nothing if the time is over.
  std::optional<Result<std::optional<CudaState>>> wait(Clock::time_point until);

  Process process;
  bool away_before = false;  // its GPU memory, when this was asked
  std::mutex mutex;
  std::condition_variable answered;
  std::optional<Result<std::optional<CudaState>>> answer;
};

}  // namespace stasis::cli
