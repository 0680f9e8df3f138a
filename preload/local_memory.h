// What kernels have besides registers. The driver keeps enough of it in each context for as many
// threads as the device can run at once, however few do: 264 MiB on an H100 at 1 KiB a thread, 2.1
// GiB once a kernel has wanted 8 KiB. It saves all of that at a checkpoint, at its own speed,
// though between kernels it holds nothing. While the stack size is 0 there is none
// (docs/results/2026-11-22-context-memory.md).
//
// For the agent's thread, with the gate closed and the devices idle.
#pragma once

#include "eviction.h"

namespace stasis::preload {

// In all contexts. What the driver refuses stays as it is: it is saved then, as it would have been.
void release_local_memory();
// As large as it was before. On an error the rest is still to be taken: the next call goes on.
Outcome take_local_memory();

}  // namespace stasis::preload
