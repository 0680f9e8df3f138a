#include "sim/gate.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace stasis::sim {

struct Gate::Bits {
  static constexpr std::uint64_t kClosed = 1;
  static constexpr std::uint64_t kPending = 2;
  static constexpr std::uint64_t kReader = 4;  // 15 bits: at most 32767 threads
  static constexpr std::uint64_t kReaderMask = 0x7fff * kReader;
  static constexpr std::uint64_t kQueued = 0x20000;  // 15 bits
  static constexpr std::uint64_t kQueuedMask = 0x7fff * kQueued;
  static constexpr std::uint64_t kOpened = std::uint64_t{1} << 32;
};

std::int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void wait_on(void* word, std::uint32_t seen, Deadline deadline) {
  timespec relative;
  timespec* timeout = nullptr;
  if (deadline != kNever) {
    const auto left = deadline - now_ns();
    if (left <= 0) return;
    relative = {left / 1'000'000'000, left % 1'000'000'000};
    timeout = &relative;
  }
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, timeout, nullptr, 0);
}

void wake_all(void* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Gate::enter() {
  auto seen = word_.load(std::memory_order_acquire);
  for (;;) {
    const auto next = seen + ((seen & Bits::kClosed) ? Bits::kQueued : Bits::kReader);
    if (word_.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) break;
  }
  if (!(seen & Bits::kClosed)) return;
  // open() turns every thread that queues into a reader and counts up, so nothing is left to do
  // then.
  const auto opened = static_cast<std::uint32_t>(seen >> 32);
  while (static_cast<std::uint32_t>(word_.load(std::memory_order_acquire) >> 32) == opened) {
    wait_on(high(), opened, kNever);
  }
}

void Gate::leave() {
  auto seen = word_.load(std::memory_order_acquire);
  std::uint64_t next;
  bool closes;
  do {
    next = seen - Bits::kReader;
    closes = (next & Bits::kReaderMask) == 0 && (next & Bits::kPending);
    if (closes) next = (next & ~Bits::kPending) | Bits::kClosed;
  } while (!word_.compare_exchange_weak(seen, next, std::memory_order_acq_rel));
  if (closes) wake_all(low());
}

bool Gate::try_close() {
  auto seen = word_.load(std::memory_order_acquire);
  for (;;) {
    if (seen & Bits::kClosed) return true;  // the last reader did it: there is only one closer
    const bool empty = (seen & Bits::kReaderMask) == 0;
    const auto next = empty ? ((seen & ~Bits::kPending) | Bits::kClosed) : (seen | Bits::kPending);
    if (word_.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) return empty;
  }
}

bool Gate::cancel_close() {
  auto seen = word_.load(std::memory_order_acquire);
  for (;;) {
    if (seen & Bits::kClosed) return true;
    if (word_.compare_exchange_weak(seen, seen & ~Bits::kPending, std::memory_order_acq_rel)) {
      return false;
    }
  }
}

void Gate::wait_for_readers(Deadline deadline) {
  const auto seen = word_.load(std::memory_order_acquire);
  if (seen & Bits::kClosed) return;
  wait_on(low(), static_cast<std::uint32_t>(seen), deadline);
}

void Gate::open() {
  auto seen = word_.load(std::memory_order_acquire);
  std::uint64_t next;
  do {
    const auto queued = (seen & Bits::kQueuedMask) / Bits::kQueued;
    next = (seen & ~(Bits::kClosed | Bits::kQueuedMask)) + queued * Bits::kReader + Bits::kOpened;
  } while (!word_.compare_exchange_weak(seen, next, std::memory_order_acq_rel));
  wake_all(high());
}

}  // namespace stasis::sim
