#include "checkpoint/lock_round.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/scope_guard.h"

namespace stasis {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long nothing may happen before those who are locked are let go on; grows by half each time.
constexpr microseconds kFirstPatience{5000};
// How long they are let go on at first, at most; doubles each time that this brings nobody.
constexpr microseconds kFirstMoment{500};
constexpr microseconds kLongestMoment{1'000'000};

class Round {
 public:
  Round(const std::vector<Process*>& processes, milliseconds slice, const Interrupt& interrupt,
        bool may_go_on)
      : end_(Clock::now() + slice),
        half_(may_go_on ? end_ - slice / 2 : end_ - slice),
        interrupt_(interrupt) {
    for (Process* process : processes)
      ranks_.push_back({process, Step::kToLock, 0, {}});
  }

  LockRound run() {
    std::vector<std::jthread> threads;
    // Also where there is no memory for what follows: they wait for it.
    const ScopeGuard end([this] {
      const std::lock_guard lock(mutex_);
      over_ = true;
      wake_.notify_all();
    });
    threads.reserve(ranks_.size());
    for (Rank& rank : ranks_) {
      try {
        threads.emplace_back([this, &rank] { work(rank); });
      } catch (const std::system_error& error) {
        const std::lock_guard lock(mutex_);
        rank.step = Step::kFailed;
        rank.why = fail(ErrorCode::kOutOfHostMemory,
                        fmt::format("cannot start a thread: {}", error.what()),
                        "free host memory, or raise the limits of it (ulimit -v) and of processes "
                        "(ulimit -u)");
      }
    }
    supervise();
    threads.clear();  // joins them
    LockRound out;
    out.tries = tries_;
    out.all_locked = all(Step::kLocked);
    for (Rank& rank : ranks_) {
      if (rank.step == Step::kFailed) out.result = std::move(rank.why);
    }
    return out;
  }

 private:
  enum class Step { kToLock, kToGoOn, kLocked, kTimedOut, kFailed };
  struct Rank {
    Process* process;
    Step step;
    int went_on;  // in which try it was last let go on
    Result<void> why;
  };

  bool all(Step step) const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [step](const Rank& rank) { return rank.step == step; });
  }
  bool any(Step step) const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [step](const Rank& rank) { return rank.step == step; });
  }
  // Nothing that could still happen would make all of them locked, or all are.
  bool decided() const { return all(Step::kLocked) || any(Step::kTimedOut) || any(Step::kFailed); }

  void supervise() {
    std::unique_lock lock(mutex_);
    auto patience = kFirstPatience;
    while (!decided()) {
      const std::uint64_t seen = changes_;
      const auto until = std::min<Clock::time_point>(Clock::now() + patience, half_);
      if (Clock::now() >= half_) {
        changed_.wait(lock, [&] { return decided(); });
        break;
      }
      if (changed_.wait_until(lock, until, [&] { return changes_ != seen; })) continue;
      if (Clock::now() >= half_ || any(Step::kToGoOn)) continue;
      // Somebody holds up the others, or has much to do.
      patience = others_came_ ? kFirstPatience : patience + patience / 2;
      if (!others_came_ && tries_ > 1) moment_ = std::min(moment_ * 2, kLongestMoment);
      others_came_ = false;
      if (any(Step::kLocked)) ++tries_;
      for (Rank& rank : ranks_) {
        if (rank.step != Step::kLocked) continue;
        rank.step = Step::kToGoOn;
        rank.went_on = tries_;
      }
      wake_.notify_all();
    }
    over_ = true;
    wake_.notify_all();
  }

  void work(Rank& rank) {
    std::unique_lock lock(mutex_);
    while (!over_) {
      if (rank.step != Step::kToLock && rank.step != Step::kToGoOn) {
        if (rank.step != Step::kLocked) return;
        wake_.wait(lock, [&] { return over_ || rank.step != Step::kLocked; });
        continue;
      }
      Result<void> done;
      const bool again = rank.step == Step::kToGoOn;
      lock.unlock();
      if (again) {
        done = rank.process->unlock();
        lock.lock();
        const auto until = std::min<Clock::time_point>(Clock::now() + moment_, half_);
        if (done) wake_.wait_until(lock, until, [this] { return others_came_ || over_; });
        rank.step = Step::kToLock;
        if (over_) return;  // somebody has failed: it runs, as the others will
        lock.unlock();
      }
      if (done) done = ask(*rank.process, again);
      const bool stopped = !done && (done.error().code == ErrorCode::kTimeout ||
                                     done.error().code == ErrorCode::kInterrupted);
      if (!done && !stopped && !still_cuda(*rank.process)) done = {};
      lock.lock();
      if (done) {
        rank.step = Step::kLocked;
        if (rank.went_on != tries_) {
          others_came_ = true;
          wake_.notify_all();
        }
      } else if (done.error().code == ErrorCode::kTimeout) {
        rank.step = Step::kTimedOut;
      } else {
        rank.step = Step::kFailed;
        rank.why = std::move(done);
      }
      ++changes_;
      changed_.notify_one();
    }
  }

  // Alive, and not by exec become a program without CUDA. "Could not ask" counts as still there.
  static bool still_cuda(const Process& process) {
    if (!process.alive()) return false;
    const auto state = process.cuda_state();
    return state ? state->has_value() : state.error().code != ErrorCode::kProcessGone;
  }

  Result<void> ask(Process& process, bool again) const {
    const auto left = [this] {
      return std::max(std::chrono::ceil<milliseconds>(end_ - Clock::now()), milliseconds(1));
    };
    if (again) return process.lock_again(left(), interrupt_);
    if (!process.alive()) return {};
    auto state = process.state();
    if (!state) return fail(std::move(state.error()));
    // By us in an earlier round, or by an operation that was killed.
    if (*state == CudaState::kLocked || *state == CudaState::kCheckpointed) return {};
    return process.lock_again(left(), interrupt_);
  }

  Clock::time_point end_;
  Clock::time_point half_;  // from here on nobody is let go on
  const Interrupt& interrupt_;
  std::vector<Rank> ranks_;  // of fixed size; the rest is guarded by
  std::mutex mutex_;
  std::condition_variable wake_;     // the workers: a step, or the end
  std::condition_variable changed_;  // the supervisor: a worker's answer
  std::uint64_t changes_ = 0;
  microseconds moment_ = kFirstMoment;
  // Since some were last let go on, one has come that was not among them.
  bool others_came_ = false;
  int tries_ = 1;
  bool over_ = false;
};

}  // namespace

LockRound lock_round(const std::vector<Process*>& processes, milliseconds slice,
                     const Interrupt& interrupt, bool may_go_on) {
  return Round(processes, slice, interrupt, may_go_on).run();
}

}  // namespace stasis
