// GPU memory that processes share with each other: which process has made what another has
// imported, and the way of it out and back. The driver saves a process that has another's memory,
// and cannot restore it; so the importers give it up before the driver's checkpoint, and take it
// again after its restore (docs/adr/0046-shared-memory.md). What the processes say of it may be
// forged. One thread at a time.
#pragma once

#include <chrono>
#include <vector>

#include "checkpoint/driver_obstacles.h"
#include "checkpoint/process_tree.h"
#include "direct/agent_set.h"
#include "direct/heirs.h"
#include "direct/stillness.h"

namespace stasis {

// kNotSupported if any of these processes has memory of one that is not among them and lives, or if
// one that is not among them has some of theirs open, or a device or another host: names both sides
// as far as they are known. kInternal if two claim to have made the same piece.
Result<void> check_sharing(const std::vector<ProcessShares>& processes);

// Memory by CUDA IPC is open more often than these processes say, or one of them has imported what
// none of them has or inherits. Besides by a process that is not among them, that comes of a handle
// on its way, or of a communicator of NCCL's that one rank has destroyed before the other, for as
// long as they run.
bool may_settle(const std::vector<ProcessShares>& processes);

// Leaves out what the agents bring back: the memory that NCCL shares, and managed memory as long as
// the programs run. `quiesced`: then all of that has to be gone. Of managed memory that an agent
// cannot give up it says so. Returns what it has left out.
std::vector<Obstacle> drop_lifted(std::vector<Obstacle>& obstacles, bool quiesced = false);

// For how long the tool waits for it, and when it asks again.
constexpr std::chrono::milliseconds kHandOver{2000};
constexpr std::chrono::milliseconds kHandOverPause{10};

// Asks all of them: how much one shared when it last answered says nothing of now.
Result<std::vector<ProcessShares>> ask_for_shares(AgentSet& agents);
// The same while the programs run: asks again, for kHandOver, as long as may_settle().
// kInterrupted.
Result<std::vector<ProcessShares>> ask_for_settled_shares(AgentSet& agents,
                                                          const Interrupt& interrupt);
// Whether any of them has another's memory.
bool any_imports(const std::vector<ProcessShares>& processes);

// All gates are closed: every process gives up what it has of others; what has no owner any more is
// inherited before. After an error some have, and attach_all() brings it back.
// Threads that reach managed memory are kept still meanwhile, as in attach_all().
Result<void> detach_all(AgentSet& agents, const DriverThreads& threads);
// All processes that miss memory of others take it again. Their owners are among the agents, or
// among `lenders`, whose programs may run. The driver must hold none of them. Forgets processes
// that have ended.
Result<void> attach_all(AgentSet& agents, AgentSet& lenders, const DriverThreads& threads);

}  // namespace stasis
