// Which system call a stopped thread was in, so that it can be made again (docs/adr/0007). For the
// tool, and for what it loads into criu, which has no C++ library. Header only.
//
// `read(address, data, size)` reads the process's memory: false where it cannot.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

namespace stasis::interrupted {

// What a system call that was interrupted has in its result register (linux/errno.h; these never
// reach the program).
inline constexpr std::int64_t kRestartSys = -512;
inline constexpr std::int64_t kRestartNoIntr = -513;
inline constexpr std::int64_t kRestartNoHand = -514;
inline constexpr std::int64_t kRestartBlock = -516;
// `syscall` is two bytes long.
inline constexpr std::uint64_t kSyscallLength = 2;

// These return EINTR when a thread was stopped and goes on, though no signal was for the program
// (`man 7 signal`). Programs that never get signals may take it for a failure.
inline bool returns_eintr_after_stop(std::uint64_t number) {
  switch (number) {
    case SYS_epoll_wait:
    case SYS_epoll_pwait:
#ifdef SYS_epoll_pwait2
    case SYS_epoll_pwait2:
#endif
    case SYS_semop:
    case SYS_semtimedop:
    case SYS_rt_sigtimedwait:
    case SYS_io_getevents:
    // On sockets with a time-out (SO_RCVTIMEO, SO_SNDTIMEO), when no data has moved.
    case SYS_read:
    case SYS_readv:
    case SYS_recvfrom:
    case SYS_recvmsg:
    case SYS_recvmmsg:
    case SYS_write:
    case SYS_writev:
    case SYS_sendto:
    case SYS_sendmsg:
    case SYS_sendmmsg:
    case SYS_accept:
    case SYS_accept4:
    case SYS_connect:
#ifdef SYS_io_uring_enter
    case SYS_io_uring_enter:
#endif
      return true;
    default:
      return false;
  }
}

// These wait for a time that the kernel keeps, not their arguments: where they were interrupted
// (kRestartBlock), it goes on by restart_syscall, and only in that very process.
inline bool waits_for_kept_time(std::uint64_t number) {
  switch (number) {
    case SYS_poll:
    case SYS_nanosleep:
    case SYS_futex:
    case SYS_clock_nanosleep:
      return true;
    default:
      return false;
  }
}

// The registers of a thread right behind its `syscall`, as far as they matter here.
struct CallRegisters {
  std::uint64_t number = 0;  // orig_rax
  std::uint64_t instruction = 0;
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  std::uint64_t fourth = 0;
};

// `mov eax, NUMBER`, the last one in front of `syscall`. Arguments may be loaded in between, as
// glibc 2.36 does.
inline constexpr std::uint8_t kLoadNumber = 0xb8;
inline constexpr std::size_t kLoadLength = 5;
inline constexpr std::size_t kSearched = 32;

template <class Read>
std::optional<std::uint64_t> number_in_code(const Read& read, std::uint64_t instruction) {
  std::array<std::uint8_t, kSearched> code{};
  const std::uint64_t call = instruction - kSyscallLength;
  if (instruction < kSearched + kSyscallLength ||
      !read(call - kSearched, code.data(), code.size())) {
    return std::nullopt;
  }
  for (std::size_t at = code.size() - kLoadLength + 1; at-- > 0;) {
    if (code[at] != kLoadNumber) continue;
    std::uint32_t number = 0;
    std::memcpy(&number, code.data() + at + 1, sizeof number);
    if (waits_for_kept_time(number)) return number;
  }
  return std::nullopt;
}

inline bool is_address(std::uint64_t value) {
  return value >= 0x10000;
}  // vm.mmap_min_addr's default

template <class Read>
bool is_time_at(const Read& read, std::uint64_t address) {
  std::array<std::int64_t, 2> time{-1, -1};
  constexpr std::int64_t kSecond = 1'000'000'000;
  return is_address(address) && read(address, time.data(), sizeof time) && time[0] >= 0 &&
         time[1] >= 0 && time[1] < kSecond;
}

template <class Read>
bool has_value(const Read& read, std::uint64_t address, std::uint64_t value) {
  std::uint32_t now = 0;
  return read(address, &now, sizeof now) && now == static_cast<std::uint32_t>(value);
}

// Nothing is at the same time a clock, a number of files, a futex's operation and an address. A
// program that deceives the tool gets another call of its own made.
template <class Read>
std::optional<std::uint64_t> number_by_arguments(const Read& read, const CallRegisters& registers) {
  constexpr std::uint64_t kClocks = 16;
  constexpr std::uint64_t kMostFiles = 1 << 20;
  if (registers.first < kClocks && registers.second == 0 && is_time_at(read, registers.third))
    return SYS_clock_nanosleep;
  if (registers.first == 0 && registers.second == 0) return SYS_poll;
  if (!is_address(registers.first)) return std::nullopt;
  if (is_address(registers.second)) {
    if (is_time_at(read, registers.first)) return SYS_nanosleep;
    return std::nullopt;
  }
  const std::uint64_t operation = registers.second & ~std::uint64_t{FUTEX_CLOCK_REALTIME};
  const bool waits = operation == FUTEX_WAIT || operation == FUTEX_WAIT_PRIVATE ||
                     operation == FUTEX_WAIT_BITSET || operation == FUTEX_WAIT_BITSET_PRIVATE;
  if (waits && is_time_at(read, registers.fourth) &&
      has_value(read, registers.first, registers.third)) {
    return SYS_futex;
  }
  if (registers.second == 0) {
    if (is_time_at(read, registers.first)) return SYS_nanosleep;
    return std::nullopt;
  }
  if (!waits && registers.second < kMostFiles) return SYS_poll;
  return std::nullopt;
}

// The call that the thread has made: `number`, but where that is restart_syscall, by which the
// kernel went on after an earlier stop (SIGSTOP, a tracer), the call it had made before. The number
// is lost then, and the arguments are not: it is what the code in front of the instruction loads,
// or whose arguments they can only be. Nothing if that is not sure.
template <class Read>
std::optional<std::uint64_t> call_made(const Read& read, const CallRegisters& registers) {
  if (registers.number != SYS_restart_syscall) return registers.number;
  if (const auto number = number_in_code(read, registers.instruction)) return number;
  return number_by_arguments(read, registers);
}

}  // namespace stasis::interrupted
