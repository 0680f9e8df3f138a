// Which system call a stopped thread was in, so that it can be made again (docs/adr/0007).
//
// Pure but for the reading of the process's code. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "base/ids.h"
#include "proc/address_space.h"

namespace stasis::proc {

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
bool returns_eintr_after_stop(std::uint64_t number);

// These wait for a time that the kernel keeps, not their arguments: where they were interrupted
// (kRestartBlock), it goes on by restart_syscall, and only in that very process.
bool waits_for_kept_time(std::uint64_t number);

// The registers of a thread right behind its `syscall`, as far as they matter here.
struct CallRegisters {
  std::uint64_t number = 0;  // orig_rax
  std::uint64_t instruction = 0;
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  std::uint64_t fourth = 0;
};

// The call that the thread has made: `number`, but where that is restart_syscall, by which the
// kernel went on after an earlier stop (SIGSTOP, a tracer), the call it had made before. The number
// is lost then, and the arguments are not: it is what the code in front of the instruction loads,
// or whose arguments they can only be. Nothing if that is not sure.
std::optional<std::uint64_t> call_made(const AddressSpace& space, const CallRegisters& registers);

// Is a signal waiting that the thread would take?
bool has_signal(Pid pid, Tid thread);

}  // namespace stasis::proc
