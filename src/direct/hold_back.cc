#include "direct/hold_back.h"

#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/threads.h"
#include "direct/gate_rank.h"
#include "direct/sharing.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;

namespace {

Result<void> open_gates(AgentSet& agents) {
  for (AgentClient& agent : agents) {
    auto opened = agent.ask(AgentCommand::kOpen, direct::kKeepBuffer, kAtOnce);
    if (!opened && agent.pidfd().alive()) return opened;
  }
  return {};
}

}  // namespace

Result<void> hold_back(const Environment& env, ProcessTree& tree, AgentSet& agents,
                       std::chrono::milliseconds timeout, const Standing& standing) {
  std::deque<GateRank> ranks;
  ProcessTree::Gates gates;
  for (AgentClient& agent : agents)
    gates[agent.pid()] = &ranks.emplace_back(agent);
  STASIS_TRY(tree.hold_back(gates, timeout, env.interrupt, standing));
  agents.drop_ended();
  return agents.check_sizes(env.driver);
}

Result<void> hold_back_settled(const Environment& env, ProcessTree& tree, AgentSet& agents,
                               std::chrono::milliseconds timeout, const Standing& standing) {
  const auto start = Clock::now();
  for (;;) {
    STASIS_TRY(hold_back(env, tree, agents, timeout, standing));
    STASIS_TRY_ASSIGN(const auto shares, ask_for_shares(agents));
    if (!may_settle(shares) || since(start) >= kHandOver) return {};
    STASIS_TRY(open_gates(agents));
    standing(false);
    tree.forget_gates();
    STASIS_TRY(env.interrupt.check());
    std::this_thread::sleep_for(kHandOverPause);
  }
}

Result<void> hold_back_together(const Environment& env, ProcessTree& tree, AgentSet& agents,
                                GroupPart& part, bool settles, const Standing& standing) {
  for (;;) {
    STASIS_TRY(settles ? hold_back_settled(env, tree, agents, part.left(), standing)
                       : hold_back(env, tree, agents, part.left(), standing));
    STASIS_TRY_ASSIGN(const auto moment, part.wait_until_quiesced());
    if (!moment) return fault(FaultPoint::kPartQuiesced);
    STASIS_TRY(open_gates(agents));
    tree.forget_gates();
    standing(false);
    STASIS_TRY(let_locked_go_on(tree));
    std::this_thread::sleep_for(*moment);
  }
}

Result<void> let_locked_go_on(ProcessTree& tree) {
  auto& members = tree.members();
  std::vector<Result<void>> results(members.size());
  at_once(members.size(), [&](std::size_t i) {
    Process& process = members[i].process;
    if (members[i].initial != CudaState::kRunning || !process.alive()) return;
    const auto state = process.cuda_state();
    if (state && *state == CudaState::kLocked) results[i] = process.unlock();
    if (!results[i] && LockedRank(process).gone()) results[i] = {};
  });
  for (auto& result : results)
    if (!result) return std::move(result);
  return {};
}

}  // namespace stasis
