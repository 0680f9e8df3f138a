// A request to stop, made from outside (a signal, a time limit, want of memory) and looked at
// between steps.
//
// The library installs no handlers for signals that ask to stop; src/cli does and sets the flag.
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <optional>
#include <string>

#include "base/result.h"

namespace stasis {

class Interrupt {
 public:
  Interrupt() = default;
  // Asks to stop also when `outer` does, which must outlive it.
  // NOLINTNEXTLINE(google-explicit-constructor): no copy
  explicit Interrupt(const Interrupt& outer) : outer_(&outer) {}

  // Async-signal-safe. The first signal counts. A later one does not break the roll-back: see
  // insists().
  void request(int signal_number) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    int none = 0;
    if (signal_.compare_exchange_strong(none, signal_number)) {
      first_.store(now);
      return;
    }
    const auto since = std::chrono::steady_clock::duration(now - first_.load());
    if (since < kTwice) return;
    std::chrono::steady_clock::rep never = 0;
    insisted_.compare_exchange_strong(never, now);
  }
  // Memory is running out: what is left is for the roll-back. May be called from within an
  // allocation.
  void want_of_memory() { no_memory_.store(true); }
  // The whole of this operation is a roll-back: what is left is for it.
  void go_on_without_memory() { heeds_memory_ = false; }

  bool requested() const {
    return signal_.load() != 0 || (outer_ != nullptr && outer_->requested());
  }
  int signal_number() const {
    const int own = signal_.load();
    return own == 0 && outer_ != nullptr ? outer_->signal_number() : own;
  }
  // A stop was requested a second time, at least a second later: a terminal, a shell and `timeout`
  // pass the same signal on in an instant. Ends the waiting for a program that does not answer, and
  // nothing else.
  bool insists() const { return insisted_.load() != 0 || (outer_ != nullptr && outer_->insists()); }
  // Since when; zero if it was not.
  std::chrono::steady_clock::duration insisted_for() const {
    const std::chrono::steady_clock::rep since = insisted_.load();
    if (since == 0)
      return outer_ != nullptr ? outer_->insisted_for() : std::chrono::steady_clock::duration();
    return std::chrono::steady_clock::now().time_since_epoch() -
           std::chrono::steady_clock::duration(since);
  }

  // From now on; zero: no limit. Not while another thread looks.
  void set_time_limit(std::chrono::milliseconds limit) {
    limit_ = limit;
    deadline_.reset();
    if (limit.count() > 0) deadline_ = std::chrono::steady_clock::now() + limit;
  }

  // kInterrupted if a stop was requested, kTimeout if the time is over, kOutOfHostMemory.
  Result<void> check() const {
    if (outer_ != nullptr) STASIS_TRY(outer_->check());
    if (heeds_memory_ && no_memory_.load()) {
      return fail(ErrorCode::kOutOfHostMemory, "this process gets no more memory",
                  "free host memory, or raise its limits (`ulimit -v`, `ulimit -d`)");
    }
    if (requested()) return fail(ErrorCode::kInterrupted, "interrupted by a signal");
    if (deadline_ && std::chrono::steady_clock::now() >= *deadline_) {
      return fail(ErrorCode::kTimeout, "not done within " + std::to_string(limit_.count()) + " ms",
                  "give it more time (--timeout)");
    }
    return {};
  }

 private:
  static constexpr std::chrono::seconds kTwice{1};

  const Interrupt* outer_ = nullptr;
  std::chrono::milliseconds limit_{0};
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  std::atomic<int> signal_{0};
  std::atomic<std::chrono::steady_clock::rep> first_{0};
  std::atomic<std::chrono::steady_clock::rep> insisted_{0};
  std::atomic<bool> no_memory_{false};
  bool heeds_memory_ = true;
};

}  // namespace stasis
