// Numbers of the kernel that must not be mixed up: a process and a thread are different types.
#pragma once

#include <compare>

namespace stasis {

// A process (thread group) in the PID namespace of this process.
struct Pid {
  int value = 0;
  auto operator<=>(const Pid&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// A thread in the PID namespace of this process.
struct Tid {
  int value = 0;
  auto operator<=>(const Tid&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

}  // namespace stasis
