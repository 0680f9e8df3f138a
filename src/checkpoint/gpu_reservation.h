// A reservation that the operations on one machine share. GPU memory that one operation takes for a
// while must never be what the driver needs for the restore of another process: the driver would
// lose that process. What each operation has found to be free is enough for all of them together,
// as long as no operation has a program's memory twice: in the program, and where its content was
// prefetched to.
//
// Two lock files beside the journal, so that it ends with the operation however that ends. Where
// there is no such directory no operation prefetches. Moves. One thread at a time.
#pragma once

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"

namespace stasis {

class GpuReservation {
 public:
  // Called before the operation looks what is free; until the driver has restored, no operation has
  // a program's memory twice. Waits for one that has, at most half a minute: then it goes on as if
  // there were none. kInterrupted.
  Result<void> come_back(const Interrupt& interrupt);
  // Whether this is the operation that may prefetch content.
  bool reserve_prefetch();
  // Whether it may have that content and the program's memory at the same time, until leave(); an
  // operation that calls come_back() meanwhile waits. Ends what come_back() has begun in any case.
  bool reserve_twice();
  void leave();
  // No prefetched content is left. What come_back() has begun goes on.
  void leave_prefetch() { prefetch_.reset(); }

 private:
  UniqueFd back_;
  UniqueFd prefetch_;
};

}  // namespace stasis
