// How long the parts of an operation take.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "base/units.h"

namespace stasis {

struct PhaseRecord {
  std::string name;    // "lock", "checkpoint", "criu", "checksums", ...
  double seconds = 0;  // stored with microsecond precision
  // Seconds from the beginning of the operation; nothing: where the one before ends.
  std::optional<double> begins = {};
  bool operator==(const PhaseRecord&) const = default;
};

// The phase that is under way in this process, for what shows it beside the work; empty between
// them. Any thread.
class CurrentPhase {
 public:
  static void set(std::string name) {
    const std::scoped_lock lock(mutex_);
    name_ = std::move(name);
  }
  static std::string get() {
    const std::scoped_lock lock(mutex_);
    return name_;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::string name_;
};

// Measures phases one after the other.
class Phases {
 public:
  Phases() = default;
  Phases(const Phases&) = delete;
  Phases& operator=(const Phases&) = delete;
  // That in which something failed is the one that people look for in a trace.
  ~Phases() { end(); }
  // Ends the phase before, if any, and begins the next.
  void begin(std::string name) {
    end();
    name_ = std::move(name);
    start_ = Clock::now();
    CurrentPhase::set(name_);
  }
  void end() {
    if (name_.empty()) return;
    CurrentPhase::set({});
    trace_record({TraceKind::kPhase, name_, start_, Clock::now(), 0, {}, 0});
    done_.push_back(
        {std::exchange(name_, {}), since(start_).count(), Seconds(start_ - first_).count()});
  }
  std::vector<PhaseRecord> take() {
    end();
    return std::move(done_);
  }
  // From now on the processes stand still, or run again.
  void stands_still() { still_since_ = Clock::now(); }
  void runs() {
    if (still_since_) stood_ += since(*still_since_);
    still_since_.reset();
  }
  bool standing() const { return still_since_.has_value(); }
  // All of it together. Nothing if they run and always did.
  std::optional<Seconds> downtime() const {
    if (!still_since_ && stood_.count() == 0) return std::nullopt;
    return still_since_ ? stood_ + since(*still_since_) : stood_;
  }
  const std::vector<PhaseRecord>& done() const { return done_; }
  Seconds total() const { return since(first_); }
  Clock::time_point beginning() const { return first_; }

 private:
  Clock::time_point first_ = Clock::now();
  Clock::time_point start_;
  std::optional<Clock::time_point> still_since_;
  Seconds stood_{0};
  std::string name_;
  std::vector<PhaseRecord> done_;
};

}  // namespace stasis
