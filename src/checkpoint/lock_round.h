// Locks processes that may wait for one another on their GPUs, as the ranks of a collective do.
#pragma once

#include <chrono>
#include <vector>

#include "checkpoint/process.h"

namespace stasis {

struct LockRound {
  bool all_locked = false;
  int tries = 1;        // how often any of them was asked
  Result<void> result;  // what went wrong besides processes that did not come to rest in time
};

// Asks all of `processes`, which run or are locked, for the lock at the same time, and waits for at
// most `slice` until every one has it. Those that end meanwhile, or are no CUDA process any more,
// count as locked.
//
// A rank that has begun a collective cannot be locked before the others have begun it too, and
// those may be locked already. So the locked ones are let go on for a moment and asked again, while
// the others' locks are pending and hold back all that comes after the collective. The moment ends
// when the first of those others has come to rest, so that nobody gets to the next collective; for
// those that wait for nothing but their own kernels it is short at first, and doubles. During the
// second half of the slice nobody is let go on: a process with long kernels needs no more than
// time.
//
// Ends at once, with kInterrupted, when `interrupt` asks to stop and calls of the driver can be
// ended (bounded_driver.h); else when the locks that are pending end by themselves.
//
// Those that are locked in the end stay so, also when not all are. Without `may_go_on` nobody is
// let go on: threads that somebody holds would not, and stand in the way of the next lock.
LockRound lock_round(const std::vector<Process*>& processes, std::chrono::milliseconds slice,
                     const Interrupt& interrupt, bool may_go_on = true);

}  // namespace stasis
