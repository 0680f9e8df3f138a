// Quiesces processes that may wait for one another on their GPUs, as the ranks of a collective do.
#pragma once

#include <chrono>
#include <span>

#include "base/interrupt.h"
#include "checkpoint/process.h"

namespace stasis {

// A process that can be held back and let go on, by whatever means. Used by one thread at a time, a
// different one for each.
class Rank {
 public:
  Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  virtual ~Rank() = default;

  // Holds back new work, waits at most `left` for what has begun, and keeps it quiesced. kTimeout:
  // it runs. kInterrupted as soon as `interrupt` asks to stop, where that is possible: release() it
  // then. `again`: after go_on().
  virtual Result<void> hold(std::chrono::milliseconds left, bool again,
                            const Interrupt& interrupt) = 0;
  // For a moment, after hold().
  virtual Result<void> go_on() = 0;
  // Makes it run, whatever has become of it.
  virtual Result<void> release() = 0;
  // It has ended, or there is nothing to be held any more.
  virtual bool gone() const = 0;
};

// By the driver's lock. One that is locked or checkpointed already counts as held.
class LockedRank final : public Rank {
 public:
  explicit LockedRank(Process& process) : process_(&process) {}

  Result<void> hold(std::chrono::milliseconds left, bool again,
                    const Interrupt& interrupt) override;
  Result<void> go_on() override { return process_->unlock(); }
  Result<void> release() override { return process_->bring_to(CudaState::kRunning); }
  bool gone() const override;

 private:
  Process* process_;
};

struct QuiesceRound {
  bool all_quiesced = false;
  int tries = 1;        // how often any of them was asked
  Result<void> result;  // what went wrong besides ranks that were not quiesced in time
  Result<void> late;    // what one of those says
};

// Asks all of `ranks` at the same time to stand still, and waits for at most `slice` until every
// one does. Those that are gone meanwhile count as if they did. If not all do, all are released. A
// rank that has begun a collective cannot stand still before the others have begun it too, and
// those may be held already. So the round lets the held ranks go on for a moment and asks them
// again, while the others are held back from all that comes after the collective. The moment ends
// when the first of those others stands still, so that no rank gets to the next collective; for
// ranks that wait for nothing but their own kernels it is short at first, and doubles. During the
// second half of the slice no rank is let go on: a process with long kernels needs no more than
// time.
//
// Ends at once, with kInterrupted, when `interrupt` asks to stop and the ranks hear of it
// (Rank::hold()); else when the ranks that are asked answer by themselves.
//
// Without `may_go_on` no rank is let go on for a moment: threads that a tracer holds would not go
// on, and stand in the way when the rank is held again.
QuiesceRound quiesce_ranks(std::span<Rank* const> ranks, std::chrono::milliseconds slice,
                           const Interrupt& interrupt, bool may_go_on = true);

}  // namespace stasis
