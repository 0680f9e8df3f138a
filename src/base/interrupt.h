// A request to stop, made from outside (a signal) and looked at between steps.
//
// The library never installs signal handlers; src/cli does and sets the flag. Thread-safe.
#pragma once

#include <atomic>

#include "stasis/result.h"

namespace stasis {

class Interrupt {
 public:
  // Async-signal-safe. The first signal counts, later ones change nothing, so that a second Ctrl-C
  // does not break the roll-back.
  void request(int signal_number) {
    int none = 0;
    signal_.compare_exchange_strong(none, signal_number);
  }
  bool requested() const { return signal_.load() != 0; }
  int signal_number() const { return signal_.load(); }

  // kInterrupted if somebody asked to stop.
  Result<void> check() const {
    if (!requested()) return {};
    return fail(ErrorCode::kInterrupted, "interrupted by a signal");
  }

 private:
  std::atomic<int> signal_{0};
};

}  // namespace stasis
