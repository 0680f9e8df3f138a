// A process that a stop signal holds (state T) while its GPU is away. plugins/criu stops what CRIU
// is about to end, so that none of its threads runs without its GPU if CRIU then lets it live.
#pragma once

#include <chrono>

#include "checkpoint/process.h"

namespace stasis {

// Brings it to `wanted` while only the thread runs by which the driver acts, then lets it go on
// (SIGCONT). On an error it stays stopped. A process that is not stopped is brought there as usual.
// kNoAnswer if the driver takes longer than `limit` (zero: none): what is left of the call may use
// `process` and its driver to the end of this program.
Result<void> bring_stopped_to(Process& process, CudaState wanted,
                              std::chrono::milliseconds limit = {});

}  // namespace stasis
