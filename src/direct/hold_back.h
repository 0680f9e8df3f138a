// Closes the gates of a process tree's agents, at a moment at which what its processes say of the
// memory that they share agrees. One thread at a time.
#pragma once

#include <chrono>
#include <functional>

#include "checkpoint/process_tree.h"
#include "direct/agent_set.h"
#include "direct/environment.h"
#include "group/group_part.h"

namespace stasis {

// Whether their processes stand still is told.
using Standing = std::function<void(bool)>;

// Closes all gates, and locks the processes of the tree that have no agent in `agents`: a process
// that waits on its GPU for one whose gate is closed could not be locked later. Forgets processes
// that have ended. `timeout` zero: no deadline. kTimeout, kInterrupted: all run.
Result<void> hold_back(const Environment& env, ProcessTree& tree, AgentSet& agents,
                       std::chrono::milliseconds timeout, const Standing& standing);

// The same, and tries again, for kHandOver, as long as may_settle(): with every tensor a queue of
// PyTorch's has a handle on its way.
Result<void> hold_back_settled(const Environment& env, ProcessTree& tree, AgentSet& agents,
                               std::chrono::milliseconds timeout, const Standing& standing);

// The same as part of a group of several nodes (`settles` or not, as above): all parts are quiesced
// when it returns without an error. After GroupPart::wait_for_all().
Result<void> hold_back_together(const Environment& env, ProcessTree& tree, AgentSet& agents,
                                GroupPart& part, bool settles, const Standing& standing);

// Unlocks those that the tree has locked; it locks them again. Not while gates are closed.
Result<void> let_locked_go_on(ProcessTree& tree);

}  // namespace stasis
