// The name of the agent's thread in a target (preload/), by which it is known from outside.
#pragma once

namespace stasis {

// It calls the driver only when it is asked to by a peer, so it is let run while the program's own
// threads are kept still (checkpoint/parking.h).
inline constexpr char kAgentThread[] = "stasis-agent";

}  // namespace stasis
