// SPDX-License-Identifier: GPL-2.0-or-later
// What dump and restore share: the processes of a tree that CRIU holds, and time limits.
// On criu's main thread, which is the one that traces.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "checkpoint/process_tree.h"
#include "proc/awake_thread.h"

namespace stasis::plugin {

// Who is to act in the processes of a tree.
enum class Acting {
  kDriver,
  kDriverAndAgents,  // where agents have to take again what they have given up
};

// Wakes the threads by which these act in each CUDA process below `root`, where this thread holds
// them by ptrace. Processes that no tracer holds need no waking. On an error all are held as
// before.
Result<std::vector<proc::AwakeThread>> wake_tree(Driver& driver, Pid root, Acting acting);

// Holds them all again. Returns the first error, after all were tried.
Result<void> put_to_sleep(std::vector<proc::AwakeThread>& awake);

// Kills the tree and collects its threads, those of `root` but the first, as their tracer must:
// what has been killed and is not collected neither ends nor lets the first process of its PID
// namespace end, and CRIU, which waits for that one, would never come back. CRIU finds `root` dead
// by itself.
void kill_tree(Pid root);

// GPU memory that the tree below `root` has; all that there is here where that cannot be known, as
// in some containers.
std::uint64_t bytes_on_gpus(Driver& driver, Pid root);
// What the tree's processes have in host memory: of what the driver has moved there at least so
// much.
std::uint64_t bytes_in_host_memory(Pid root);

// STASIS_DRIVER_TIMEOUT of criu's environment, in milliseconds. Nothing if it is not set, or no
// such number, which is logged.
inline constexpr const char* kDriverTimeoutVariable = "STASIS_DRIVER_TIMEOUT";
std::optional<std::chrono::milliseconds> asked_driver_timeout();

// How long it may take the driver to move so much memory before it counts as hanging: 2.6 GB/s and
// more were measured (H100, driver 580), a busy host may be ten times as slow. What is
// asked for is what it is given besides; 60 s by default.
std::chrono::milliseconds timeout(std::uint64_t bytes);

}  // namespace stasis::plugin
