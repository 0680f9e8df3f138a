#include "proc/interrupted_call.h"

#include <linux/futex.h>
#include <sys/syscall.h>

#include <array>
#include <cstddef>
#include <cstring>

#include "proc/procfs.h"

namespace stasis::proc {
namespace {

// `mov eax, NUMBER`, the last one in front of `syscall`. Arguments may be loaded in between, as
// glibc 2.36 does.
constexpr std::uint8_t kLoadNumber = 0xb8;
constexpr std::size_t kLoadLength = 5;
constexpr std::size_t kSearched = 32;

std::optional<std::uint64_t> number_in_code(const AddressSpace& space, std::uint64_t instruction) {
  std::array<std::uint8_t, kSearched> code{};
  const std::uint64_t call = instruction - kSyscallLength;
  if (instruction < kSearched + kSyscallLength ||
      !space.read(call - kSearched, code.data(), code.size())) {
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

bool is_address(std::uint64_t value) { return value >= 0x10000; }  // vm.mmap_min_addr's default

bool is_time_at(const AddressSpace& space, std::uint64_t address) {
  std::array<std::int64_t, 2> time{-1, -1};
  constexpr std::int64_t kSecond = 1'000'000'000;
  return is_address(address) && space.read(address, time.data(), sizeof time) && time[0] >= 0 &&
         time[1] >= 0 && time[1] < kSecond;
}

bool has_value(const AddressSpace& space, std::uint64_t address, std::uint64_t value) {
  std::uint32_t now = 0;
  return space.read(address, &now, sizeof now) && now == static_cast<std::uint32_t>(value);
}

// Nothing is at the same time a clock, a number of files, a futex's operation and an address. A
// program that deceives the tool gets another call of its own made.
std::optional<std::uint64_t> number_by_arguments(const AddressSpace& space,
                                                 const CallRegisters& registers) {
  constexpr std::uint64_t kClocks = 16;
  constexpr std::uint64_t kMostFiles = 1 << 20;
  if (registers.first < kClocks && registers.second == 0 && is_time_at(space, registers.third))
    return SYS_clock_nanosleep;
  if (registers.first == 0 && registers.second == 0) return SYS_poll;
  if (!is_address(registers.first)) return std::nullopt;
  if (is_address(registers.second)) {
    if (is_time_at(space, registers.first)) return SYS_nanosleep;
    return std::nullopt;
  }
  const std::uint64_t operation = registers.second & ~std::uint64_t{FUTEX_CLOCK_REALTIME};
  const bool waits = operation == FUTEX_WAIT || operation == FUTEX_WAIT_PRIVATE ||
                     operation == FUTEX_WAIT_BITSET || operation == FUTEX_WAIT_BITSET_PRIVATE;
  if (waits && is_time_at(space, registers.fourth) &&
      has_value(space, registers.first, registers.third)) {
    return SYS_futex;
  }
  if (registers.second == 0) {
    if (is_time_at(space, registers.first)) return SYS_nanosleep;
    return std::nullopt;
  }
  if (!waits && registers.second < kMostFiles) return SYS_poll;
  return std::nullopt;
}

}  // namespace

bool returns_eintr_after_stop(std::uint64_t number) {
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

bool waits_for_kept_time(std::uint64_t number) {
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

std::optional<std::uint64_t> call_made(const AddressSpace& space, const CallRegisters& registers) {
  if (registers.number != SYS_restart_syscall) return registers.number;
  if (const auto number = number_in_code(space, registers.instruction)) return number;
  return number_by_arguments(space, registers);
}

bool has_signal(Pid pid, Tid thread) {
  const auto status = ProcFs().thread_status(pid, thread);
  return status && (status->pending & ~status->blocked) != 0;
}

}  // namespace stasis::proc
