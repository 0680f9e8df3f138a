// GPU memory that processes share with each other: which process has made what another has
// imported, and the way of it out and back. The driver saves a process that has another's memory,
// and cannot restore it; so the importers give it up before the driver's checkpoint, and take it
// again after its restore (docs/adr/0046-shared-memory.md). What the processes say of it may be
// forged. One thread at a time.
#pragma once

#include <chrono>
#include <vector>

#include "direct/agent_set.h"

namespace stasis {

// What one process shares.
struct ProcessShares {
  Pid pid;
  unsigned uid = 0;
  std::vector<direct::Share> shares;
};

// kNotSupported if any of these processes has memory of one that is not among them, or if one that
// is not among them has some of theirs open: names both sides as far as they are known. kInternal
// if two claim to have made the same piece.
Result<void> check_sharing(const std::vector<ProcessShares>& processes);

// Memory by CUDA IPC is open more often than these processes say. Besides by one that is not among
// them, that comes of one that opens or closes it at this moment, for as long as it runs.
bool is_open_elsewhere(const std::vector<ProcessShares>& processes);

// kNotSupported if one of them has a multicast object (cuMulticastCreate), which neither the driver
// nor an agent brings back.
Result<void> refuse_multicast(const AgentSet& agents);

// For how long is_open_elsewhere() may come of a handle on its way, and when to ask again.
constexpr std::chrono::milliseconds kHandOver{1000};
constexpr std::chrono::milliseconds kHandOverPause{10};

// Asks those agents that have anything to say.
Result<std::vector<ProcessShares>> ask_for_shares(AgentSet& agents);
// The same while the programs run: asks again, for kHandOver, as long as a handle may be on its
// way. kInterrupted.
Result<std::vector<ProcessShares>> ask_for_settled_shares(AgentSet& agents,
                                                          const Interrupt& interrupt);
// Whether any of them has another's memory.
bool any_imports(const std::vector<ProcessShares>& processes);

// All gates are closed: every process gives up what it has of others. After an error some have, and
// attach_all() brings it back.
Result<void> detach_all(AgentSet& agents);
// All processes that miss memory of others take it again. Their owners are among the agents, or
// among `lenders`, whose programs may run. The driver must hold none of them.
Result<void> attach_all(AgentSet& agents, AgentSet& lenders);

}  // namespace stasis
