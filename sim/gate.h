// The gate in front of the API: calls pass it as readers, the driver's lock closes it.
//
// As the real driver's lock seems to be (docs/simulated-driver.md): a closer that waits does not
// stop newcomers, so busy threads can starve it; and callers that queue in front of a closed gate
// own it as soon as it opens, so a second lock has to wait until they have all passed.
//
// Threads: everything is atomic operations and futexes, no mutex, because open() and close() must
// work while other threads of the process are stopped by a debugger anywhere in enter().
#pragma once

#include <atomic>
#include <cstdint>

namespace stasis::sim {

// CLOCK_MONOTONIC in nanoseconds; kNever is no deadline.
using Deadline = std::int64_t;
inline constexpr Deadline kNever = INT64_MAX;
std::int64_t now_ns();

// futex(2) on the 32 bits at an address: sleeps if they hold `seen`, until woken or the deadline.
void wait_on(void* word, std::uint32_t seen, Deadline deadline);
void wake_all(void* word);

class Gate {
 public:
  // A call passes; waits while the gate is closed. Every enter() needs one leave().
  void enter();
  void leave();

  // Waits until no call is inside and closes the gate, or gives up: at the deadline, or when
  // `abandoned` (asked every 50 ms at least) says so.
  template <class Abandoned>
  bool close(Deadline deadline, Abandoned abandoned) {
    for (;;) {
      if (try_close()) return true;
      const auto now = now_ns();
      if (now >= deadline || abandoned()) return cancel_close();
      const auto slice = now + 50'000'000;
      wait_for_readers(slice < deadline ? slice : deadline);
    }
  }

  // Lets all threads that queue pass. Only for a closed gate.
  void open();

 private:
  // Low word: closed, pending, readers inside, callers queued; high word: how often it was opened.
  struct Bits;
  bool try_close();     // also leaves the mark that lets the last reader close it for us
  bool cancel_close();  // true: it was closed for us meanwhile
  void wait_for_readers(Deadline deadline);
  // x86-64 is little-endian: the low half comes first.
  void* low() { return &word_; }
  void* high() { return reinterpret_cast<char*>(&word_) + 4; }

  alignas(8) std::atomic<std::uint64_t> word_{0};
};

// Work that was submitted and is not done yet; the driver's lock waits until there is none.
class Outstanding {
 public:
  void add() { count_.fetch_add(1, std::memory_order_acq_rel); }
  void done() {
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == 1) wake_all(&count_);
  }
  std::uint32_t count() const { return count_.load(std::memory_order_acquire); }

  template <class Abandoned>
  bool wait_for_none(Deadline deadline, Abandoned abandoned) {
    while (auto seen = count()) {
      const auto now = now_ns();
      if (now >= deadline || abandoned()) return false;
      const auto slice = now + 50'000'000;
      wait_on(&count_, seen, slice < deadline ? slice : deadline);
    }
    return true;
  }

 private:
  std::atomic<std::uint32_t> count_{0};
};

}  // namespace stasis::sim
