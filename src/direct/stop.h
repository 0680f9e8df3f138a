// What all threads of one piece of work look at: may it go on, and why not.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "base/interrupt.h"
#include "base/result.h"
#include "base/units.h"

namespace stasis::direct {

class Stop {
 public:
  // `what` is in the message of a time-out: "copying GPU memory out".
  Stop(const Interrupt& interrupt, Clock::time_point deadline, const char* what)
      : interrupt_(&interrupt), deadline_(deadline), what_(what) {}

  // The first error counts.
  void fail(Error error) {
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = std::move(error);
    stopped_.store(true);
  }
  // A failure is taken over; true if there is none.
  bool ok(Result<void> result) {
    if (!result) fail(std::move(result.error()));
    return result.has_value();
  }
  bool stopped() const { return stopped_.load(); }
  // Looks at the interrupt and at the clock as well; false: stop.
  bool go_on() {
    if (stopped()) return false;
    if (Clock::now() >= deadline_) {
      fail(Error{ErrorCode::kTimeout, std::string(what_) + " took longer than its deadline allows",
                 "see whether the GPU or the disk is in trouble (the kernel's log): it was given "
                 "far more than "
                 "it needs"});
      return false;
    }
    return ok(interrupt_->check());
  }
  Result<void> result() const {
    const std::scoped_lock lock(mutex_);
    if (error_) return stasis::fail(*error_);
    return {};
  }

 private:
  const Interrupt* interrupt_;
  Clock::time_point deadline_;
  const char* what_;
  std::atomic<bool> stopped_{false};
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace stasis::direct
