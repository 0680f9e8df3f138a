// A tool copies the program's device memory while the program runs (docs/adr/0054-pre-copy.md): a
// process of its own has it mapped, so what the program gives back would not be free.
#pragma once

#include <atomic>

#include "abi/agent_protocol.h"

namespace stasis::preload {

// What the agent's page says of it. Null in a forked child, which has no page.
void heed_precopy(std::atomic<direct::PrecopyState>* word);
// Before memory of the program's is given back: waits until no tool has it mapped any more. Some
// milliseconds, once for each such copy; otherwise it costs a look at one word. Leaves errno.
void wait_for_precopy();
// For the agent's thread: the tool is gone.
void end_precopy();

}  // namespace stasis::preload
