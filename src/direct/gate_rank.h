// A process that is held back by the gate of the agent in it.
#pragma once

#include "checkpoint/process.h"
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

// One whose agent came while it ran (ADR 53): a thread may be in a call that it made before the
// hooks were in, which the gate does not know of, and that agent does not wait for the device. The
// driver's lock waits for both. A call that waited for the lock is through when it is taken once
// more, because the closed gate lets no new one begin. The process is not locked afterwards.
class DrainedRank final : public Rank {
 public:
  DrainedRank(direct::AgentClient& agent, Process& process) : gate_(agent), process_(&process) {}

  // Besides what GateRank::hold() says, what Process::lock_again() does.
  Result<void> hold(std::chrono::milliseconds left, bool again,
                    const Interrupt& interrupt) override;
  Result<void> go_on() override { return gate_.go_on(); }
  Result<void> release() override;
  bool gone() const override { return gate_.gone(); }

 private:
  GateRank gate_;
  Process* process_;
};

}  // namespace stasis
