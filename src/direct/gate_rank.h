// A process that is held back by the gate of the agent in it.
#pragma once

#include "checkpoint/quiesce_round.h"
#include "direct/agent_client.h"

namespace stasis {

// While its gate opens and closes, it keeps the host memory that was made ready for its content.
class GateRank final : public Rank {
 public:
  explicit GateRank(direct::AgentClient& agent) : agent_(&agent) {}

  // Besides what Rank says: kNoAnswer if the agent takes seconds more than `left`, and what an
  // agent answers to kClose.
  Result<void> hold(std::chrono::milliseconds left, bool again,
                    const Interrupt& interrupt) override;
  Result<void> go_on() override;
  Result<void> release() override { return closed_ ? go_on() : Result<void>(); }
  bool gone() const override { return !agent_->pidfd().alive(); }

 private:
  direct::AgentClient* agent_;
  bool closed_ = false;
};

}  // namespace stasis
