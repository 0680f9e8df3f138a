// The agent's thread, its page, and what it does when a tool asks (include/abi/agent_protocol.h).
#pragma once

#include <cstdint>

namespace stasis::preload {

class Agent {
 public:
  // From the first allocation that can leave. Cheap when it runs already; does nothing if it cannot
  // be started, which leaves the process to the driver's own checkpoint until a later allocation.
  static void start();
  // The same, after memory of another process's has been opened: the agent's page says at once that
  // this process has some, for tools that cannot ask. The driver would lose the process.
  static void start_with_import();
  // The same for managed memory, and at any change of how much there is.
  static void start_with_managed();
  static void note_managed();
  // So many sockets has it made on which others ask for memory.
  static void note_services(std::uint32_t made);
};

}  // namespace stasis::preload
