// The gate in front of the calls that touch device memory.
//
// Open, it costs a call two writes to a line that only its own thread writes, and one read of a
// line that is written only when the gate closes or opens: no fence, because close() makes every
// thread pass one (membarrier). Closed, a thread waits in front of the call, outside the driver,
// and not in it. The same is true of handlers of signals, also of those that come while it waits.
#pragma once

#include <atomic>
#include <cstdint>

#include "deadline.h"

namespace stasis::preload {

class Gate {
 public:
  // One thread's place. Never freed, because a thread may call the driver until its very end;
  // reused when the thread has ended.
  struct alignas(64) Place {
    // Both are written by its own thread alone, and by handlers of signals that run on that.
    std::atomic<std::uint32_t> inside{0};
    std::atomic<std::uint32_t> depth{0};  // calls let in, and calls of the driver within those
    std::atomic<bool> taken{true};
    Place* next = nullptr;
  };

  // A call in progress. The agent's own threads make their calls without.
  class Pass {
   public:
    Pass() : place_(place_of_this_thread()), was_inside_(enter(*place_)) {}
    ~Pass() { leave(*place_, was_inside_); }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    Place* place_;
    bool was_inside_;
  };

  // The same for one that does not wait: it is in only if the gate is open.
  class TryPass {
   public:
    TryPass() : place_(place_of_this_thread()), is_in_(try_enter(*place_, was_inside_)) {}
    ~TryPass() {
      if (is_in_) leave(*place_, was_inside_);
    }
    TryPass(const TryPass&) = delete;
    TryPass& operator=(const TryPass&) = delete;
    bool is_in() const { return is_in_; }

   private:
    Place* place_;
    bool was_inside_ = false;
    bool is_in_;
  };

  // Holds back new calls and waits for those in progress. False when that time is over: it is
  // open again.
  static bool close(const Timeout& timeout);
  static void open();
  // How often it began to close and was opened. What another process said between two equal
  // answers, of which the later was had inside, it said while the gate was open here.
  static std::uint32_t changes() { return changes_.load(std::memory_order_acquire); }

  // Every call fences for itself from now on: where the kernel does not do it for all, and under
  // checkers of threads, which know nothing of that.
  static void fence_in_every_call() { shared_.fence_needed = true; }
  static bool fences_in_every_call() { return shared_.fence_needed; }

  // In a forked child: no thread but this one is inside.
  static void reset_after_fork();

 private:
  static Place* place_of_this_thread() {
    Place* place = place_;
    return place ? place : make_place();
  }
  // A handler may come between any two lines. Until a call of its thread has been let in it asks
  // for itself, and it leaves what that has said already: whether it is inside.
  static bool enter(Place& place) {
    const bool was_inside = place.inside.load(std::memory_order_relaxed) != 0;
    if (place.depth.load(std::memory_order_relaxed) == 0 && is_closed_to(place)) [[unlikely]]
      wait_outside(place);
    go_deeper(place);
    return was_inside;
  }
  static bool try_enter(Place& place, bool& was_inside) {
    was_inside = place.inside.load(std::memory_order_relaxed) != 0;
    if (place.depth.load(std::memory_order_relaxed) == 0 && is_closed_to(place)) {
      if (!was_inside) {
        place.inside.store(0, std::memory_order_release);
        tell_closer();
      }
      return false;
    }
    go_deeper(place);
    return true;
  }
  // Says first that the thread is inside.
  static bool is_closed_to(Place& place) {
    if (shared_.fence_needed.load(std::memory_order_relaxed)) {
      place.inside.store(1, std::memory_order_seq_cst);
    } else {
      place.inside.store(1, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    return shared_.closed.load(std::memory_order_seq_cst) != 0;
  }
  static void go_deeper(Place& place) {
    place.depth.store(place.depth.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  static void leave(Place& place, bool was_inside) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    place.depth.store(place.depth.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (was_inside) return;
    place.inside.store(0, std::memory_order_release);
    if (shared_.closed.load(std::memory_order_relaxed)) [[unlikely]]
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
  alignas(64) static std::atomic<std::uint32_t> left_;  // counts threads that leave while closed
  static std::atomic<std::uint32_t> changes_;
  static std::atomic<Place*> places_;
  // Initial-exec: the library is loaded with the program, and this is one instruction.
  static thread_local Place* place_ __attribute__((tls_model("initial-exec")));
};

}  // namespace stasis::preload
