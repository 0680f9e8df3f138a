// The lock of a file for which CRIU waits while it makes a process anew: another program has taken
// it since the dump.
//
// Stateless; thread-safe.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "base/ids.h"

namespace stasis {

// "the lock of /var/lock/x, which process 12 (sh) holds", of the first of these that waits so;
// nothing if none does. By the system call in which the process is: flock(2), or fcntl(2) with a
// lock that is waited for.
std::optional<std::string> awaited_lock(std::span<const Pid> processes);

}  // namespace stasis
