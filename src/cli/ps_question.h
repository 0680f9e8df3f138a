// What `stasis ps` asks about one process, of the driver and of its agent. Private to src/cli.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "base/cuda_state.h"
#include "base/result.h"
#include "base/units.h"
#include "checkpoint/process.h"
#include "direct/agent_probe.h"

namespace stasis::cli {

// Asked on a thread that is left behind if there is no answer in time: what is at work on a process
// keeps every tool waiting that asks about it (driver 580). The agent is looked for there, too: a
// process may have a million descriptors to be looked through.
struct Question {
  explicit Question(Process about) : process(std::move(about)) {}

  // Agents that are not found by `until` are looked for no longer.
  static void ask(const std::shared_ptr<Question>& question, Clock::time_point until);
  // Nothing if the time is over.
  std::optional<Result<std::optional<CudaState>>> wait(Clock::time_point until);

  struct Agent {
    bool away_before = false;  // its GPU memory, when this was asked
    // When it was last seen, if at all.
    std::optional<std::optional<direct::ProbedAgent>> seen;
  };
  Agent agent();

  Process process;
  std::mutex mutex;
  std::condition_variable answered;
  std::optional<Result<std::optional<CudaState>>> answer;

 private:
  void probe(Clock::time_point until, bool before);

  Agent agent_;
};

}  // namespace stasis::cli
