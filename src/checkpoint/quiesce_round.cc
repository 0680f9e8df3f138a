#include "checkpoint/quiesce_round.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/scope_guard.h"
#include "base/threads.h"
#include "base/units.h"

namespace stasis {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long nothing may happen before the ranks that are held are let go on; grows by half each
// time.
constexpr microseconds kFirstTimeout{5000};
// How long they are let go on at first, at most; doubles each time that no further rank is held.
constexpr microseconds kFirstMoment{500};
constexpr microseconds kLongestMoment{1'000'000};

class Round {
 public:
  Round(std::span<Rank* const> ranks, milliseconds slice, const Interrupt& interrupt,
        bool may_go_on)
      : end_(Clock::now() + slice),
        half_(may_go_on ? end_ - slice / 2 : end_ - slice),
        interrupt_(interrupt) {
    for (Rank* rank : ranks)
      places_.push_back({rank, Step::kToHold, 0, {}, {}, true});
  }

  QuiesceRound run() {
    std::vector<std::jthread> threads;
    // Also where there is no memory for what follows: the workers wait for it.
    const ScopeGuard end([this] {
      const std::lock_guard lock(mutex_);
      over_ = true;
      wake_.notify_all();
    });
    threads.reserve(places_.size());
    for (Place& place : places_) {
      try {
        threads.emplace_back([this, &place] { work(place); });
      } catch (const std::system_error& error) {
        const std::lock_guard lock(mutex_);
        place.has_thread = false;
        place.step = Step::kFailed;
        place.why = fail(no_thread(error));
      }
    }
    supervise();
    threads.clear();  // joins them
    for (Place& place : places_)
      if (!place.has_thread) release(place);
    QuiesceRound out;
    out.tries = tries_;
    out.all_quiesced = all_quiesced_;
    for (Place& place : places_) {
      if (place.step == Step::kFailed) out.result = std::move(place.why);
      if (place.step == Step::kTimedOut) out.late = std::move(place.why);
    }
    for (Place& place : places_) {
      if (out.result && !place.released) out.result = std::move(place.released);
    }
    return out;
  }

 private:
  enum class Step { kToHold, kToGoOn, kHeld, kTimedOut, kFailed };
  struct Place {
    Rank* rank;
    Step step;
    int went_on;  // in which try it was last let go on
    Result<void> why;
    Result<void> released;
    bool has_thread = true;
  };

  bool all(Step step) const {
    return std::all_of(places_.begin(), places_.end(),
                       [step](const Place& place) { return place.step == step; });
  }
  bool any(Step step) const {
    return std::any_of(places_.begin(), places_.end(),
                       [step](const Place& place) { return place.step == step; });
  }
  // Nothing that could still happen would quiesce all of them, or all are.
  bool decided() const { return all(Step::kHeld) || any(Step::kTimedOut) || any(Step::kFailed); }

  void supervise() {
    std::unique_lock lock(mutex_);
    auto timeout = kFirstTimeout;
    while (!decided()) {
      const std::uint64_t seen = changes_;
      const auto until = std::min<Clock::time_point>(Clock::now() + timeout, half_);
      if (Clock::now() >= half_) {
        changed_.wait(lock, [&] { return decided(); });
        break;
      }
      if (changed_.wait_until(lock, until, [&] { return changes_ != seen; })) continue;
      if (Clock::now() >= half_ || any(Step::kToGoOn)) continue;
      // A rank holds up the others, or has much to do.
      timeout = others_came_ ? kFirstTimeout : timeout + timeout / 2;
      if (!others_came_ && tries_ > 1) moment_ = std::min(moment_ * 2, kLongestMoment);
      others_came_ = false;
      if (any(Step::kHeld)) ++tries_;
      for (Place& place : places_) {
        if (place.step != Step::kHeld) continue;
        place.step = Step::kToGoOn;
        place.went_on = tries_;
      }
      wake_.notify_all();
    }
    all_quiesced_ = all(Step::kHeld);
    over_ = true;
    wake_.notify_all();
  }

  void work(Place& place) {
    std::unique_lock lock(mutex_);
    while (!over_ && place.step != Step::kTimedOut && place.step != Step::kFailed) {
      if (place.step == Step::kHeld)
        wake_.wait(lock, [&] { return over_ || place.step != Step::kHeld; });
      else
        ask(place, lock);
    }
    if (all_quiesced_) return;
    // All at the same time: those that are held still hold up the others.
    lock.unlock();
    release(place);
  }

  static void release(Place& place) {
    auto released = place.rank->release();
    if (!released && !place.rank->gone()) place.released = std::move(released);
  }

  void ask(Place& place, std::unique_lock<std::mutex>& lock) {
    Result<void> done;
    const bool again = place.step == Step::kToGoOn;
    lock.unlock();
    if (again) {
      done = place.rank->go_on();
      lock.lock();
      const auto until = std::min<Clock::time_point>(Clock::now() + moment_, half_);
      if (done) wake_.wait_until(lock, until, [this] { return others_came_ || over_; });
      place.step = Step::kToHold;
      if (over_) return;  // a rank has failed: this one runs, as the others will
      lock.unlock();
    }
    const auto left = std::chrono::ceil<milliseconds>(end_ - Clock::now());
    if (done) done = place.rank->hold(std::max(left, milliseconds(1)), again, interrupt_);
    const bool stopped = !done && (done.error().code == ErrorCode::kTimeout ||
                                   done.error().code == ErrorCode::kInterrupted);
    if (!done && !stopped && place.rank->gone()) done = {};
    lock.lock();
    if (done) {
      place.step = Step::kHeld;
      if (place.went_on != tries_) {
        others_came_ = true;
        wake_.notify_all();
      }
    } else {
      const bool late = done.error().code == ErrorCode::kTimeout;
      place.step = late ? Step::kTimedOut : Step::kFailed;
      place.why = std::move(done);
    }
    ++changes_;
    changed_.notify_one();
  }

  Clock::time_point end_;
  Clock::time_point half_;  // from here on no rank is let go on
  const Interrupt& interrupt_;
  std::vector<Place> places_;  // of fixed size; the rest is guarded by
  std::mutex mutex_;
  std::condition_variable wake_;     // the workers: a step, or the end
  std::condition_variable changed_;  // the supervisor: a worker's answer
  std::uint64_t changes_ = 0;
  microseconds moment_ = kFirstMoment;
  // Since some were last let go on, one has come that was not among them.
  bool others_came_ = false;
  int tries_ = 1;
  bool over_ = false;
  bool all_quiesced_ = false;
};

}  // namespace

Result<void> LockedRank::hold(milliseconds left, bool again, const Interrupt& interrupt) {
  if (again) return process_->lock_again(left, interrupt);
  if (!process_->alive()) return {};
  STASIS_TRY_ASSIGN(auto state, process_->state());
  // Locked by this tool in an earlier round, or by an operation that was killed.
  if (state == CudaState::kLocked || state == CudaState::kCheckpointed) return {};
  return process_->lock_again(left, interrupt);
}

// Alive, and not by exec become a program without CUDA. "Could not ask" counts as still there.
bool LockedRank::gone() const {
  if (!process_->alive()) return true;
  const auto state = process_->cuda_state();
  return state ? !state->has_value() : state.error().code == ErrorCode::kProcessGone;
}

QuiesceRound quiesce_ranks(std::span<Rank* const> ranks, milliseconds slice,
                           const Interrupt& interrupt, bool may_go_on) {
  return Round(ranks, slice, interrupt, may_go_on).run();
}

}  // namespace stasis
