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
// How long they are let go on at first.
constexpr microseconds kFirstMoment{200};

class Round {
 public:
  Round(const std::vector<Process*>& processes, milliseconds slice, bool may_go_on)
      : start_(Clock::now()), end_(start_ + slice), may_go_on_(may_go_on) {
    for (Process* process : processes)
      ranks_.push_back({process, Step::kToLock, {}});
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
        rank.why = fail(ErrorCode::kIo, fmt::format("cannot start a thread: {}", error.what()),
                        "raise the limit on processes (ulimit -u)");
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
    const auto half = may_go_on_ ? start_ + (end_ - start_) / 2 : start_;
    std::vector<const Rank*> let_go_on;
    let_go_on.reserve(ranks_.size());
    while (!decided()) {
      const std::uint64_t seen = changes_;
      const auto until = std::min<Clock::time_point>(Clock::now() + patience, half);
      if (Clock::now() >= half) {
        changed_.wait(lock, [&] { return decided(); });
        break;
      }
      if (changed_.wait_until(lock, until, [&] { return changes_ != seen; })) continue;
      if (Clock::now() >= half || any(Step::kToGoOn)) continue;
      // Somebody holds up the others, or has much to do. Have those come who had been let go on?
      const bool others_came = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
        return rank.step == Step::kLocked &&
               std::find(let_go_on.begin(), let_go_on.end(), &rank) == let_go_on.end();
      });
      moment_ = others_came ? kFirstMoment : moment_ * 2;
      patience += patience / 2;
      let_go_on.clear();
      for (Rank& rank : ranks_) {
        if (rank.step != Step::kLocked) continue;
        rank.step = Step::kToGoOn;
        let_go_on.push_back(&rank);
      }
      if (!let_go_on.empty()) ++tries_;
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
      if (rank.step == Step::kToGoOn) {
        const microseconds moment = moment_;
        lock.unlock();
        done = go_on(*rank.process, moment);
        lock.lock();
        rank.step = Step::kToLock;
      }
      lock.unlock();
      if (done) done = ask(*rank.process);
      lock.lock();
      if (done) {
        rank.step = Step::kLocked;
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

  static Result<void> go_on(Process& process, microseconds moment) {
    auto done = process.unlock();
    if (done) std::this_thread::sleep_for(moment);
    return done || still_cuda(process) ? done : Result<void>();
  }

  Result<void> ask(Process& process) const {
    if (!process.alive()) return {};
    auto state = process.state();
    // By us in an earlier round, or by an operation that was killed.
    if (state && (*state == CudaState::kLocked || *state == CudaState::kCheckpointed)) return {};
    const auto left = std::chrono::ceil<milliseconds>(end_ - Clock::now());
    auto done = state ? process.lock(std::max(left, milliseconds(1)))
                      : Result<void>(fail(std::move(state.error())));
    if (done || (done.error().code != ErrorCode::kTimeout && !still_cuda(process))) return {};
    return done;
  }

  Clock::time_point start_;
  Clock::time_point end_;
  bool may_go_on_;
  std::vector<Rank> ranks_;  // of fixed size; the rest is guarded by
  std::mutex mutex_;
  std::condition_variable wake_;     // the workers: a step, or the end
  std::condition_variable changed_;  // the supervisor: a worker's answer
  std::uint64_t changes_ = 0;
  microseconds moment_ = kFirstMoment;
  int tries_ = 1;
  bool over_ = false;
};

}  // namespace

LockRound lock_round(const std::vector<Process*>& processes, milliseconds slice, bool may_go_on) {
  return Round(processes, slice, may_go_on).run();
}

}  // namespace stasis
