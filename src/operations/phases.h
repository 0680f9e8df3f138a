// How long the parts of an operation take. Not for use outside this folder.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "base/units.h"
#include "image/manifest.h"

namespace stasis {

// Measures phases one after the other.
class Phases {
 public:
  // Ends the phase before, if any, and begins the next.
  void begin(std::string name) {
    end();
    name_ = std::move(name);
    start_ = Clock::now();
  }
  void end() {
    if (name_.empty()) return;
    trace_record({TraceKind::kPhase, name_, start_, Clock::now(), 0, {}, 0});
    done_.push_back({std::exchange(name_, {}), since(start_).count()});
  }
  std::vector<PhaseRecord> take() {
    end();
    return std::move(done_);
  }
  // From now on the processes stand still, or run again.
  void stands_still() { still_since_ = Clock::now(); }
  void runs() { still_since_.reset(); }
  std::optional<Seconds> standstill() const {
    return still_since_ ? std::optional(Seconds(since(*still_since_))) : std::nullopt;
  }
  const std::vector<PhaseRecord>& done() const { return done_; }
  Seconds total() const { return since(first_); }

 private:
  Clock::time_point first_ = Clock::now();
  Clock::time_point start_;
  std::optional<Clock::time_point> still_since_;
  std::string name_;
  std::vector<PhaseRecord> done_;
};

}  // namespace stasis
