#include "direct/gate_rank.h"

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

}  // namespace stasis
