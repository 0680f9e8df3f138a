// The gate in front of the calls that touch device memory.
//
// Open, it costs a call two writes to a line that only its own thread writes, and one read of a
// line that nobody writes: no fence, because close() makes every thread pass one (membarrier).
// Closed, a thread waits in front of the call, outside the driver, and not in it. The same is true
// of handlers of signals, also of those that come while it waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace stasis::preload {

class Gate {
 public:
  // One thread's place. Never freed, because a thread may call the driver until its very end;
  // reused when the thread has ended.
  struct alignas(64) Place {
    // Calls of the driver in progress: more than one where it calls back, or a signal comes.
    // Written by its own thread alone, and by handlers that run on that: they leave it as they
    // found it.
    std::atomic<std::uint32_t> inside{0};
    std::atomic<bool> taken{true};
    Place* next = nullptr;
  };

  // A call in progress. The agent's own threads make their calls without.
  class Pass {
   public:
    Pass() : place_(place_of_this_thread()) { enter(*place_); }
    ~Pass() { leave(*place_); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    Place* place_;
  };

  // Holds back new calls and waits for those in progress. False at the deadline: it is open again.
  static bool close(std::chrono::steady_clock::time_point deadline);
  static void open();

  // Every call fences for itself from now on: where the kernel does not do it for all, and under
  // checkers of threads, which know nothing of that.
  static void fence_in_every_call() { shared_.fence_needed = true; }
  static bool fences_in_every_call() { return shared_.fence_needed; }

  // In a forked child: nobody is inside but this thread.
  static void reset_after_fork();

 private:
  static Place* place_of_this_thread() {
    Place* place = place_;
    return place ? place : make_place();
  }
  static void enter(Place& place) {
    const auto outer = place.inside.load(std::memory_order_relaxed);
    if (shared_.fence_needed.load(std::memory_order_relaxed)) {
      place.inside.store(outer + 1, std::memory_order_seq_cst);
    } else {
      place.inside.store(outer + 1, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    if (outer != 0) return;
    if (shared_.closed.load(std::memory_order_seq_cst)) [[unlikely]]
      wait_outside(place);
  }
  static void leave(Place& place) {
    const auto outer = place.inside.load(std::memory_order_relaxed) - 1;
    place.inside.store(outer, std::memory_order_release);
    if (outer == 0 && shared_.closed.load(std::memory_order_relaxed)) [[unlikely]]
      tell_closer();
  }
  static Place* make_place();
  static void wait_outside(Place& place);
  static void tell_closer();
  static void forget_thread(void* place);

  // Read by every call, written by close() and open() alone.
  struct alignas(64) Shared {
    std::atomic<std::uint32_t> closed{0};
    std::atomic<bool> fence_needed{false};
  };
  static Shared shared_;
  alignas(64) static std::atomic<std::uint32_t> left_;  // counts who leaves while it is closed
  static std::atomic<Place*> places_;
  // Initial-exec: the library is loaded with the program, and this is one instruction.
  static thread_local Place* place_ __attribute__((tls_model("initial-exec")));
};

}  // namespace stasis::preload
