// The name of the agent's thread in a target (preload/), by which it is known from outside.
#pragma once

namespace stasis {

// Once the driver is about to hold the process it calls no driver unless a peer asks for that, so
// it can be let run while the program's own threads are kept still (proc/parking.h).
inline constexpr char kAgentThread[] = "stasis-agent";

// Of a thread by which a tool asks the driver in a process that it looks at
// (attach/inside_code.cc).
inline constexpr char kInsideThread[] = "stasis-inside";

}  // namespace stasis
