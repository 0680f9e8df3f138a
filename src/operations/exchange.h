// An agent that came to a running program exchanges the driver's memory for its own, while the
// program's threads stand still. Private to src/operations.
#pragma once

#include <chrono>

#include "direct/agent_client.h"
#include "direct/environment.h"

namespace stasis {

// The agent's gate is closed, and it has found what there is. kProcessGone if the process has ended
// or has become another program. kTimeout and kInterrupted some seconds after that, or at once when
// the user insists: whether the agent has answered by then, and is done, it says itself. A driver
// that hangs keeps it from that. The threads run on in any case.
Result<void> exchange_memory(const Environment& env, direct::AgentClient& agent,
                             std::chrono::milliseconds timeout);

}  // namespace stasis
