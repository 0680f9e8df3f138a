// Keeps two users of one machine, such as root and the owner of a program, from working on one
// process at the same time: their records lie in state directories of their own, which neither can
// ask the other about.
#pragma once

#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis {

// Locks each of them until the descriptors are closed: flock() on /proc/PID/environ, which is one
// file for all tools that see the process in one /proc, and which only tools can open that may
// trace it (PTRACE_MODE_READ). What cannot be opened is left out. kBusy if another tool has one of
// them.
Result<std::vector<UniqueFd>> lock_processes(const std::vector<Pid>& pids);

}  // namespace stasis
