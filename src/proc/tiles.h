// Threads in the middle of a computation with AMX: what its tiles hold is in the processor.
//
// CRIU 4.2.1 does not save tiles, and takes them from a thread in which it runs code of its own: it
// gives the thread its state back without them. Asked by ptrace, of threads that the calling thread
// traces and has stopped.
#pragma once

#include <vector>

#include "base/error.h"
#include "base/ids.h"

namespace stasis::proc {

// False where the kernel does not tell.
bool has_tiles(Tid thread);
// Those of the process that have.
std::vector<Tid> stopped_threads_with_tiles(Pid pid);

// kBusy: a moment later no thread may have. `threads` is not empty.
Error refusal_of_tiles(Pid pid, const std::vector<Tid>& threads);

}  // namespace stasis::proc
