// Work on several threads at once, where fewer than wished will do.
#pragma once

#include <functional>

namespace stasis::direct {

// Calls work(0) on this thread and work(i) for each i below `count` on a thread of its own, and
// returns when all are done. Where the system gives no more threads, the rest is not called: how
// many were is returned, at least one.
unsigned on_threads(unsigned count, const std::function<void(unsigned)>& work);

// How many threads copy for one GPU of `gpus`, if the user does not say: all processors' share, at
// most 16, beyond which nothing gets faster (H100, PCIe 5: 51 of 55 GB/s with 16).
unsigned default_threads(unsigned gpus);

}  // namespace stasis::direct
