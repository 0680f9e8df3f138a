// How long the agent waits for something that the program has to do first.
#pragma once

#include <algorithm>
#include <chrono>

namespace stasis::preload {

class Timeout {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Timeout(Clock::time_point deadline) : deadline_(deadline) {}
  virtual ~Timeout() = default;
  Timeout(const Timeout&) = delete;
  Timeout& operator=(const Timeout&) = delete;

  Clock::time_point deadline() const { return deadline_; }
  bool over() const { return Clock::now() >= deadline_ || given_up(); }
  // The poll interval: how long to sleep, if nothing comes before, until the next check.
  std::chrono::nanoseconds poll_interval() const {
    constexpr std::chrono::nanoseconds kLongest = std::chrono::milliseconds(20);
    return std::clamp<std::chrono::nanoseconds>(deadline_ - Clock::now(),
                                                std::chrono::nanoseconds(0), kLongest);
  }

 private:
  // The peer has cancelled its request.
  virtual bool given_up() const { return false; }

  Clock::time_point deadline_;
};

}  // namespace stasis::preload
