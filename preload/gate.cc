#include "gate.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <new>

#include "abi/futex.h"

namespace stasis::preload {
namespace {

// Every thread of this process has passed a full fence when this returns. False if the kernel will
// not do it: older than 4.14, or a seccomp filter.
bool fence_all_threads() {
  if (::syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0) return true;
  // Not registered yet, or, after a restore, not any more.
  if (::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0) return false;
  return ::syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0;
}

// Its destructor tells of a thread's end.
pthread_key_t thread_end_key(void (*at_end)(void*)) {
  static const pthread_key_t key = [at_end] {
    pthread_key_t made = PTHREAD_KEYS_MAX;  // stays if none is left
    ::pthread_key_create(&made, at_end);
    return made;
  }();
  return key;
}

}  // namespace

Gate::Shared Gate::shared_;
alignas(64) std::atomic<std::uint32_t> Gate::left_{0};
std::atomic<std::uint32_t> Gate::changes_{0};
std::atomic<Gate::Place*> Gate::places_{nullptr};
thread_local Gate::Place* Gate::place_ = nullptr;

Gate::Place* Gate::make_place() {
  const int error = errno;
  Place* mine = nullptr;
  for (Place* place = places_.load(std::memory_order_acquire); place && !mine;
       place = place->next) {
    bool taken = false;
    if (place->taken.compare_exchange_strong(taken, true, std::memory_order_acquire)) mine = place;
  }
  if (!mine) {
    if (!places_.load(std::memory_order_acquire)) shared_.fence_needed = !fence_all_threads();
    mine = new Place;
    mine->next = places_.load(std::memory_order_relaxed);
    // In one order with `closed`: the thread that closes sees this place, or its thread sees it
    // closed.
    while (!places_.compare_exchange_weak(mine->next, mine, std::memory_order_seq_cst)) {
    }
  }
  place_ = mine;
  // A thread that calls the driver in a destructor after this one takes a place anew.
  ::pthread_setspecific(thread_end_key(&Gate::forget_thread), mine);
  errno = error;
  return mine;
}

void Gate::forget_thread(void* its_place) {
  auto* place = static_cast<Place*>(its_place);
  place_ = nullptr;
  // A thread that was cancelled in a call of the driver, or ended itself in a callback, has not
  // left: destructors are not run for it here. Its place would keep the gate from closing, and the
  // next thread that has it would walk through a closed one.
  if (place->inside.load(std::memory_order_relaxed) != 0) {
    place->depth.store(1, std::memory_order_relaxed);
    leave(*place, false);
  }
  place->taken.store(false, std::memory_order_release);
}

void Gate::wait_outside(Place& place) {
  // What the program finds there after a call comes from the driver, not from the agent.
  const int error = errno;
  do {
    place.inside.store(0, std::memory_order_release);
    tell_closer();
    while (shared_.closed.load(std::memory_order_acquire))
      futex::wait(shared_.closed, 1, false);
    place.inside.store(1, std::memory_order_seq_cst);
    // Closed again in between?
  } while (shared_.closed.load(std::memory_order_seq_cst));
  errno = error;
}

void Gate::tell_closer() {
  const int error = errno;
  left_.fetch_add(1, std::memory_order_release);
  futex::wake_all(left_, false);
  errno = error;
}

bool Gate::close(const Timeout& timeout) {
  changes_.fetch_add(1, std::memory_order_release);
  shared_.closed.store(1, std::memory_order_seq_cst);
  if (!shared_.fence_needed && !fence_all_threads()) {
    // The kernel made the fence once and does not any more. Threads take time to see what is
    // written here; from their next call on they fence for themselves.
    shared_.fence_needed = true;
    ::usleep(10000);
  }
  for (;;) {
    const auto seen = left_.load(std::memory_order_acquire);
    bool empty = true;
    for (Place* place = places_.load(std::memory_order_seq_cst); place && empty;
         place = place->next)
      empty = place->inside.load(std::memory_order_seq_cst) == 0;
    if (empty) return true;
    if (timeout.over()) {
      open();
      return false;
    }
    futex::wait(left_, seen, false, timeout.poll_interval());
  }
}

void Gate::open() {
  changes_.fetch_add(1, std::memory_order_release);
  shared_.closed.store(0, std::memory_order_release);
  futex::wake_all(shared_.closed, false);
}

void Gate::reset_after_fork() {
  for (Place* place = places_.load(std::memory_order_relaxed); place; place = place->next) {
    if (place == place_) continue;
    place->inside.store(0, std::memory_order_relaxed);
    place->depth.store(0, std::memory_order_relaxed);
    place->taken.store(false, std::memory_order_relaxed);
  }
  shared_.closed.store(0, std::memory_order_relaxed);
}

}  // namespace stasis::preload
