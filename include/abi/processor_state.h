// Where the kernel's answer about a thread's processor state (PTRACE_GETREGSET, NT_X86_XSTATE) says
// which parts are in use. Header only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stasis::processor_state {

inline constexpr std::uintptr_t kNote = 0x202;  // NT_X86_XSTATE of linux/elf.h
// Of XSTATE_BV, 64 bits: the header begins where the legacy region ends (Intel SDM 1, 13.4.2).
inline constexpr std::size_t kInUseAt = 512;
// XTILECFG and XTILEDATA.
inline constexpr std::uint64_t kTiles = std::uint64_t{3} << 17;

}  // namespace stasis::processor_state
