#include "operations/exchange.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/process.h"
#include "direct/agent_set.h"
#include "proc/remote_syscall.h"
#include "proc/stopped_threads.h"

namespace stasis {
namespace {

using direct::AgentClient;
using direct::AgentCommand;
using std::chrono::milliseconds;

// How long the program's threads stand still until they are let run for a moment: one of them may
// hold a lock of its allocator that the driver wants.
constexpr milliseconds kStandsStill{100};
constexpr milliseconds kRunsOn{2};
constexpr milliseconds kStopTimeout{5000};
constexpr std::chrono::microseconds kAnswerPoll{200};
// What an agent takes to answer that has done its work.
constexpr milliseconds kAnswers{10};

class Exchanging {
 public:
  Exchanging(const Environment& env, AgentClient& agent, milliseconds timeout)
      : env_(env), agent_(agent), timeout_(timeout), deadline_(Clock::now() + kStopTimeout) {}

  Result<void> run() {
    while (!is_over() && waits_on()) {
      // Of a tracer of its own, with whose end the kernel lets go of threads that could not be
      // stopped, or were killed meanwhile: unless they are waited for, an execve(2) that has killed
      // them does not go on.
      auto stood = trace_on_own_thread([&] { return stand_still(); });
      if (!begun_ && !stood) return stood;
      if (agent_.has_left()) break;
      if (!is_over()) std::this_thread::sleep_for(kRunsOn);
    }
    if ((!begun_ || !agent_.has_answered()) && agent_.has_left()) {
      return fail(ErrorCode::kProcessGone,
                  fmt::format("process {} has become another program (exec), and what it had on "
                              "the GPU has gone",
                              agent_.pid().value));
    }
    if (!begun_) return {};
    auto answered = agent_.finish(kAnswers);
    if (!answered && (agent_.has_answered() || cut_short_)) return answered;
    return std::move(cut_short_);
  }

 private:
  // An address that is free for a moment may be taken by any thread that maps memory: they stand
  // still, unless one of them holds what the driver wants.
  Result<void> stand_still() {
    const auto spared = agents_threads(agent_.pid());
    const auto stopped = proc::StoppedThreads::stop(*agent_.address_space(), [&](Tid thread) {
      return std::find(spared.begin(), spared.end(), thread) == spared.end();
    });
    if (!stopped) {
      const bool again = stopped.error().code == ErrorCode::kBusy && (begun_ || !is_late());
      return again ? Result<void>() : fail(stopped.error());
    }
    // Another program's threads, which nothing of this is about.
    if (agent_.has_left()) return {};
    begin();
    // If it has ended, or has no thread but the agent's, none maps memory.
    const auto until = Clock::now() + kStandsStill;
    while (!is_over() && Clock::now() < until)
      std::this_thread::sleep_for(kAnswerPoll);
    return {};
  }

  void begin() {
    if (std::exchange(begun_, true)) return;
    agent_.begin(AgentCommand::kAdopt, direct::kExchange);
    deadline_ = Clock::now() + timeout_;
    fault_only(FaultPoint::kAttachExchanging);
  }

  bool is_late() const { return Clock::now() >= deadline_; }
  bool is_over() const { return !agent_.pidfd().alive() || (begun_ && agent_.has_answered()); }

  // A user who wants to wait no longer gets the answer of an agent that works: an exchange takes
  // less than a second for most programs, and cannot be left half-way.
  bool waits_on() {
    if (!begun_) return true;
    if (env_.interrupt.insists()) return false;
    if (!cut_short_) return !is_late();
    cut_short_ = env_.interrupt.check();
    if (cut_short_ && is_late()) {
      cut_short_ = fail(ErrorCode::kTimeout,
                        fmt::format("the agent in process {} was not done within {} ms with the "
                                    "exchange of its GPU memory",
                                    agent_.pid().value, timeout_.count()),
                        "give it more time (--timeout)");
    }
    if (!cut_short_) deadline_ = Clock::now() + kAtOnce;
    return true;
  }

  const Environment& env_;
  AgentClient& agent_;
  milliseconds timeout_;
  Clock::time_point deadline_;
  bool begun_ = false;
  // Why the user waits no longer.
  Result<void> cut_short_;
};

}  // namespace

Result<void> exchange_memory(const Environment& env, AgentClient& agent, milliseconds timeout) {
  return Exchanging(env, agent, timeout).run();
}

}  // namespace stasis
