#include "direct/gate_rank.h"

#include <algorithm>

#include "base/fault_point.h"

namespace stasis {
namespace {

using direct::AgentCommand;
using std::chrono::milliseconds;

// How long the tool waits for an agent beyond the deadline that it has sent, and for its gate to
// open.
constexpr milliseconds kMostDelay{5000};

}  // namespace

Result<void> GateRank::hold(milliseconds left, bool /*again*/, const Interrupt& interrupt) {
  const auto end = Clock::now() + left;
  agent_->begin(AgentCommand::kClose, static_cast<std::uint64_t>(left.count()));
  auto done = agent_->finish_unless(interrupt, left + kMostDelay);
  closed_ = done.has_value();
  if (closed_) return done;
  const ErrorCode code = done.error().code;
  // An agent whose program is about to exit says so; the tool waits for the exit.
  if (code == ErrorCode::kProcessGone) {
    const auto rest = std::chrono::ceil<milliseconds>(end - Clock::now());
    (void)agent_->pidfd().wait_exit(static_cast<int>(std::max(rest, milliseconds(0)).count()));
  }
  if (auto stop = interrupt.check(); code == ErrorCode::kTimeout && !stop) return stop;
  return done;
}

Result<void> GateRank::go_on() {
  auto opened = agent_->ask(AgentCommand::kOpen, direct::kKeepBuffer, kMostDelay);
  closed_ = false;
  return opened;
}

Result<void> DrainedRank::hold(milliseconds left, bool again, const Interrupt& interrupt) {
  const auto end = Clock::now() + left;
  STASIS_TRY(gate_.hold(left, again, interrupt));
  STASIS_TRY(fault(FaultPoint::kAttachClosed));
  Result<void> drained;
  for (int times = 0; drained && times < 2; ++times) {
    const auto rest = std::chrono::ceil<milliseconds>(end - Clock::now());
    drained = process_->lock_again(std::max(rest, milliseconds(1)), interrupt);
    if (drained) drained = process_->unlock();
  }
  // Its work waits for that of a rank behind a closed gate, or is long.
  if (!drained && drained.error().code == ErrorCode::kTimeout) STASIS_TRY(gate_.release());
  return drained;
}

Result<void> DrainedRank::release() {
  // A lock that was given up may have come all the same.
  auto unlocked = process_->bring_to(CudaState::kRunning);
  auto opened = gate_.release();
  return unlocked ? opened : unlocked;
}

}  // namespace stasis
