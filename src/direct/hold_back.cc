#include "direct/hold_back.h"

#include <deque>
#include <thread>
#include <utility>

#include "direct/gate_rank.h"
#include "direct/sharing.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;

Result<void> hold_back(const Environment& env, Group& group, AgentSet& agents,
                       std::chrono::milliseconds timeout, const Standing& standing) {
  std::deque<GateRank> ranks;
  Group::Gates gates;
  for (AgentClient& agent : agents)
    gates[agent.pid()] = &ranks.emplace_back(agent);
  STASIS_TRY(group.hold_back(gates, timeout, env.interrupt, standing));
  agents.drop_ended();
  return agents.check_sizes(env.driver);
}

Result<void> hold_back_settled(const Environment& env, Group& group, AgentSet& agents,
                               std::chrono::milliseconds timeout, const Standing& standing) {
  const auto start = Clock::now();
  for (;;) {
    STASIS_TRY(hold_back(env, group, agents, timeout, standing));
    STASIS_TRY_ASSIGN(const auto shares, ask_for_shares(agents));
    if (!may_settle(shares) || since(start) >= kHandOver) return {};
    for (AgentClient& agent : agents) {
      auto opened = agent.ask(AgentCommand::kOpen, direct::kKeepBuffer, kAtOnce);
      if (!opened && agent.pidfd().alive()) return opened;
    }
    standing(false);
    group.forget_gates();
    STASIS_TRY(env.interrupt.check());
    std::this_thread::sleep_for(kHandOverPause);
  }
}

}  // namespace stasis
