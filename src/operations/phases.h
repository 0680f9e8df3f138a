// How long the parts of an operation take. Not for use outside this folder.
#pragma once

#include <string>
#include <utility>
#include <vector>

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
    done_.push_back({std::exchange(name_, {}), since(start_).count()});
  }
  std::vector<PhaseRecord> take() {
    end();
    return std::move(done_);
  }
  const std::vector<PhaseRecord>& done() const { return done_; }
  Seconds total() const { return since(first_); }

 private:
  Clock::time_point first_ = Clock::now();
  Clock::time_point start_;
  std::string name_;
  std::vector<PhaseRecord> done_;
};

}  // namespace stasis
