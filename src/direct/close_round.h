// Closes the gates of processes that may wait for one another on their GPUs, as the ranks of a
// collective do.
#pragma once

#include <chrono>
#include <vector>

#include "base/interrupt.h"
#include "direct/agent_client.h"

namespace stasis::direct {

struct CloseRound {
  bool all_closed = false;
  int tries = 1;        // how often any of them was asked
  Result<void> result;  // what went wrong; kTimeout if nothing but some that did not come to rest
};

// Asks all of `agents`, which run, to close at the same time, and waits for at most `slice` until
// every one has; an agent that then takes more than seconds to say that it has not is kNoAnswer. If
// not all have, those that have are opened again, with their buffers.
//
// What is true of the driver's lock is true here (checkpoint/lock_round.h, ADR 8): one that has
// begun a collective is at rest only when the others have begun it too, and those may be closed
// already. So the closed ones are let go on for a moment, with their buffers, and asked again,
// while the gates of those before them are closed and hold back all that comes after. The moment
// ends when the first of these has come to rest. During the second half of the slice nobody is let
// go on.
CloseRound close_round(std::vector<AgentClient>& agents, std::chrono::milliseconds slice,
                       const Interrupt& interrupt);

}  // namespace stasis::direct
