// What the driver must not be left with: memory that it saves and cannot restore, or refuses
// half-way, and that no agent gives up in its place. What processes say of it may be forged. One
// thread at a time.
#pragma once

#include "checkpoint/process_tree.h"
#include "direct/agent_set.h"
#include "direct/environment.h"

namespace stasis {

// kNotSupported if one of them has a multicast object (cuMulticastCreate), which neither the driver
// nor an agent brings back.
Result<void> refuse_multicast(const AgentSet& agents);
// kNotSupported if one of them has managed memory, which the driver is not to be asked about.
Result<void> refuse_managed(const AgentSet& agents);

// Whether the process has memory that the driver saves and cannot restore: another's, its own that
// another has, which would have another one's content afterwards, or the host's from cuMemCreate.
Result<bool> is_lost_by_driver(direct::AgentClient& agent);

// For tools by which the driver alone moves the memory: NVIDIA's utility as we stand in for it, the
// plugin for CRIU, the single calls of C and Python. kNotSupported if the process would be lost by
// that, as its agent says, or may be, as it does not answer.
Result<void> refuse_loss_by_driver(const Process& process);

// Called when the gates of `agents` are closed, and the driver has locked the other processes of
// the tree. kBusy, to be tried once more, if one of those has begun to share memory since the
// agents were found: nothing would take it away before the driver's checkpoint, whose restore
// fails. By the driver's path what no other process has of it may go.
Result<void> refuse_late_sharing(const Environment& env, const ProcessTree& tree,
                                 const AgentSet& agents, MemoryPath path);

}  // namespace stasis
