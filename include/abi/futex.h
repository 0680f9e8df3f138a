// The kernel's futex, in the three forms that are needed. `shared`: the word lies in memory that
// several processes map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <type_traits>

namespace stasis::futex {

// A word may be of a type of its own, an enum of its values.
//
// Until woken, or the word is not `value`, or a signal, or the time has passed (negative: never).
template <class Word>
void wait(std::atomic<Word>& word, std::type_identity_t<Word> value, bool shared,
          std::chrono::nanoseconds timeout = std::chrono::nanoseconds(-1)) {
  static_assert(sizeof(std::atomic<Word>) == sizeof(std::uint32_t), "the kernel's words");
  const int flags = shared ? 0 : FUTEX_PRIVATE_FLAG;
  timespec time{};
  time.tv_sec = timeout.count() / 1000000000;
  time.tv_nsec = timeout.count() % 1000000000;
  ::syscall(SYS_futex, &word, FUTEX_WAIT | flags, static_cast<std::uint32_t>(value),
            timeout.count() < 0 ? nullptr : &time, nullptr, 0);
}

template <class Word>
void wake_all(std::atomic<Word>& word, bool shared) {
  static_assert(sizeof(std::atomic<Word>) == sizeof(std::uint32_t), "the kernel's words");
  const int flags = shared ? 0 : FUTEX_PRIVATE_FLAG;
  ::syscall(SYS_futex, &word, FUTEX_WAKE | flags, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace stasis::futex
