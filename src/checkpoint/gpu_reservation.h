// What operations on the programs of one machine agree on, so that GPU memory that one of them
// takes for a while is never what the driver of another needs to restore a process, which it would
// lose. What one has checked to be free for it stays so in sum, as long as nobody has a program's
// memory twice: in the program, and besides where its content was brought ahead.
//
// Two lock files beside the journal, so that it ends with the operation however that ends. Where
// there is no such directory nobody brings anything ahead. Moves. One thread at a time.
#pragma once

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"

namespace stasis {

class GpuReservation {
 public:
  // From before it is looked what is free until the driver has restored: nobody has anything twice.
  // Waits for who has, but at most for half a minute: then it goes on as if nobody had.
  // kInterrupted.
  Result<void> come_back(const Interrupt& interrupt);
  // Whether this is the one that may have content ahead.
  bool claim_ahead();
  // Whether it may have that and its place at the same time, until leave(); whoever comes back
  // meanwhile waits. Ends what come_back() has begun in any case.
  bool claim_twice();
  void leave();
  // Nothing is ahead any more. What come_back() has begun goes on.
  void leave_ahead() { ahead_.reset(); }

 private:
  UniqueFd back_;
  UniqueFd ahead_;
};

}  // namespace stasis
