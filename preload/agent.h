// The agent's thread, its page, and what it does when a tool asks (include/abi/agent_protocol.h).
#pragma once

namespace stasis::preload {

class Agent {
 public:
  // From the first allocation that can leave. Cheap when it runs already; does nothing if it cannot
  // be started, which leaves the process to the driver's own checkpoint until a later allocation.
  static void start();
};

}  // namespace stasis::preload
