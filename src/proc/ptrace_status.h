// What the callers here give to ptrace(2).
#pragma once

#include <cstdint>

namespace stasis::proc {

// linux/ptrace.h; <sys/ptrace.h> of older C libraries lacks it.
inline constexpr long kSuspendSeccomp = 1L << 21;

// The kernel takes numbers in the place of pointers.
inline void* as_pointer(std::uint64_t number) {
  return reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace stasis::proc
