// A process that a stop signal holds (state T) while its GPU is away. plugins/criu stops what CRIU
// is about to end, so that none of its threads runs without its GPU if CRIU then lets it live.
#pragma once

#include "checkpoint/process.h"

namespace stasis {

// Brings it to `wanted` while only the thread runs by which the driver acts, then lets it go on
// (SIGCONT). On an error it stays stopped. A process that is not stopped is brought there as usual.
Result<void> bring_stopped_to(Process& process, CudaState wanted);

}  // namespace stasis
