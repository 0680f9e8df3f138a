// Which process holds the lock of a file (flock(2)), for messages and for how long to wait.
//
// Stateless; thread-safe.
#pragma once

#include <sys/stat.h>

#include <optional>

#include "base/fd.h"
#include "base/ids.h"
#include "proc/procfs.h"

namespace stasis::proc {

// As far as /proc/locks shows it: not one of another PID namespace, nor one that has ended and left
// the lock to a child.
std::optional<Pid> lock_holder(const UniqueFd& file);
// By the file's device and inode, where it may not be asked itself.
std::optional<Pid> lock_holder(const struct stat& status);

// By its program: one of ours, a criu, in which our plugin may be, or one that acts by our library,
// as Python's. A process can call itself so: nothing but messages and a wait goes by it.
bool is_tool(const ProcessInfo& process);

// The holder, if it can be seen and is no tool.
std::optional<ProcessInfo> lock_holder_that_is_no_tool(const UniqueFd& file);

}  // namespace stasis::proc
