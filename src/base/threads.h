// Work on several threads at once. Where the system gives fewer threads than wished, fewer will do.
#pragma once

#include <cstddef>
#include <functional>
#include <system_error>

#include "base/error.h"

namespace stasis {

// The system gives no thread: kOutOfHostMemory.
Error no_thread(const std::system_error& why);

// Calls work(0) on this thread and work(i) for each i below `count` on a thread of its own, and
// returns when all are done. Where the system gives no more threads, the rest is not called: how
// many were is returned, at least one. For workers that share what there is to do.
unsigned on_threads(unsigned count, const std::function<void(unsigned)>& work);

// Calls work(i) for each i below `count`, all at the same time and none on this thread, and returns
// when all are done. Where the system gives no more threads, the rest is called on this one:
// nothing is left out. For work that waits.
void at_once(std::size_t count, const std::function<void(std::size_t)>& work);
// The same, with `meanwhile` called on this thread while the others work.
void at_once(std::size_t count, const std::function<void(std::size_t)>& work,
             const std::function<void()>& meanwhile);

// The most threads of share_out().
inline constexpr unsigned kMostSharers = 8;

// Calls work(i) for each i below `count`, shared among a thread for each processor, kMostSharers at
// most, this one among them, and returns when all are done. For work that asks the kernel for
// something of many processes: each thread makes its calls with a limit of time over one other
// (call_within.h).
void share_out(std::size_t count, const std::function<void(std::size_t)>& work);

// How many threads copy for one GPU of `gpus`, if the user does not say: all processors' share, at
// most 16, beyond which nothing gets faster (H100, PCIe 5: 51 of 55 GB/s with 16).
unsigned default_threads(unsigned gpus);

}  // namespace stasis
