// How far a long step has come, told to the caller, which shows it to the user.
//
// The library calls update() at most some twenty times a second and once at the end of a phase,
// never from two threads at once, but also from a thread of its own: an exception there would end
// the whole program, and anywhere else it would cut an operation short. So update() must not throw,
// nor block for long: the job stands still meanwhile.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace stasis {

struct Progress {
  virtual ~Progress() = default;
  // `phase` is a short noun ("checksums", "verify"); `done` and `total` are bytes. Both 0: nothing
  // moves, and the step waits for another process.
  virtual void update(std::string_view phase, std::uint64_t done, std::uint64_t total) = 0;
};

// For callers that show no progress.
struct NoProgress final : Progress {
  void update(std::string_view, std::uint64_t, std::uint64_t) override {}
};

// For a loop that waits for another process, however often it goes round.
class Waiting {
 public:
  explicit Waiting(Progress& progress) : progress_(progress) {}
  void tell() {
    constexpr std::chrono::milliseconds kInterval{50};
    const auto now = std::chrono::steady_clock::now();
    if (now - told_ < kInterval) return;
    told_ = now;
    progress_.update("waiting", 0, 0);
  }

 private:
  Progress& progress_;
  std::chrono::steady_clock::time_point told_;
};

}  // namespace stasis
