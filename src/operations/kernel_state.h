// What the kernel keeps for a process and CRIU loses at a restore (docs/adr/0038-kernel-state.md):
// read at the dump, put right at the restore.
//
// Private to src/operations. One thread at a time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "image/manifest.h"

namespace stasis {

// Reads it of every process of the tree below `root`, which stands still, into `processes`. What
// cannot be read is left out: the restore then leaves it as CRIU does. Of what cannot be told for
// sure a sentence goes to `lost`.
void read_kernel_state(Pid root, std::vector<ProcessRecord>& processes,
                       std::vector<std::string>& lost);

// Of which processes some of it is set only when they have run for a moment after a restore: those
// without CUDA, whose threads are not parked. A sentence each.
std::vector<std::string> set_late(const std::vector<ProcessRecord>& processes);

// Told what could not be put right, a sentence each; a restore goes on without.
using Warn = std::function<void(std::string)>;

// The part that is set from outside. For the moment at which all is restored and nothing runs yet.
void set_kernel_state(const std::vector<ProcessRecord>& processes, const Warn& warn);

// Tells in `lost` which of the restored processes are in another audit session than they were in.
// The kernel gives each login a new number; no process can have an old one again.
void note_audit_sessions(const std::vector<ProcessRecord>& processes,
                         std::vector<std::string>& lost);

// The part that only a thread of the process can set, by system calls that it makes for us. CRIU
// is done by then. Threads that are parked still are; the others are stopped for it, and only where
// there is something to set. `parent_ends`: the root's parent is about to end, and the
// tree is to live on: the root's threads (CRIU's files say of each) get no signal of that.
void set_kernel_state_within(const std::vector<ProcessRecord>& processes, Pid root,
                             bool parent_ends, const UniqueFd& criu_dir, const Warn& warn);

}  // namespace stasis
