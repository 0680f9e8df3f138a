#include "direct/unrestorable_memory.h"

#include <utility>

#include <fmt/format.h>

#include "direct/agent_lookup.h"
#include "direct/hold_back.h"
#include "direct/left_to_driver.h"
#include "direct/sharing.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentState;

namespace {

std::vector<const Process*> running(const ProcessTree& tree) {
  std::vector<const Process*> processes;
  for (const TreeMember& member : tree.members())
    if (member.initial == CudaState::kRunning && member.process.alive())
      processes.push_back(&member.process);
  return processes;
}

}  // namespace

Result<bool> UnrestorableMemory::is_any() {
  bool any = false;
  for (AgentClient& agent : agents_) {
    STASIS_TRY_ASSIGN(const bool shared, is_lost_by_driver(agent));
    any = any || shared || agent.managed_areas() != 0 || agent.driver_share_count() != 0 ||
          agent.multicast_count() != 0;
  }
  return any;
}

// What no agent takes again.
Result<void> UnrestorableMemory::refuse(const Environment& env, const ProcessTree& tree) {
  STASIS_TRY(refuse_shared(env, agents_.driver_shares(), false));
  STASIS_TRY(refuse_multicast(agents_));
  STASIS_TRY(refuse_late_sharing(env, tree, agents_, MemoryPath::kDirect));
  STASIS_TRY_ASSIGN(const auto shares, ask_for_shares(agents_));
  return check_sharing(shares);
}

Result<void> UnrestorableMemory::give_up(const Environment& env, ProcessTree& tree,
                                         std::chrono::milliseconds timeout) {
  auto done = agents_.find_running(env, running(tree));
  Result<bool> any = false;
  if (done) any = is_any();
  if (!done || !any || !*any) {
    agents_.clear();
    if (!done) return done;
    return any ? Result<void>() : fail(std::move(any.error()));
  }
  done = hold_back_settled(env, tree, agents_, timeout, [](bool) {});
  if (done) done = refuse(env, tree);
  if (done) done = note_driver_threads(agents_, running(tree), driver_threads_);
  moving_ = true;
  if (done) done = detach_all(agents_, driver_threads_);
  moving_ = false;
  if (done) return {};
  tree.forget_gates();
  auto back = take_back();
  return back ? done : back;
}

Result<void> UnrestorableMemory::find(const Environment& env, const ProcessTree& tree) {
  auto closed = running(tree);
  std::erase_if(closed, [](const Process* process) {
    return threads_that_take_back(process->pid()).empty();
  });
  return agents_.find_evicted(env, closed);
}

Result<void> UnrestorableMemory::take_back() {
  AgentSet none;
  for (AgentClient& agent : agents_)
    agent.heed_second_only();
  moving_ = true;
  auto done = attach_all(agents_, none, driver_threads_);
  // Their gates were not closed, or were opened before.
  agents_.drop_running();
  if (done) done = agents_.open();
  moving_ = false;
  agents_.drop_ended();
  if (!done && !agents_.empty() && done.error().code != ErrorCode::kNotRolledBack) {
    done.error().code = ErrorCode::kNotRolledBack;
    done.error().remedy = fmt::format("`stasis recover {}`", agents_.begin()->pid().value);
  }
  const bool left = !agents_.empty();
  agents_.clear();
  return left ? done : Result<void>();
}

std::vector<Tid> threads_that_take_back(Pid pid) {
  const auto seen = direct::probe_agent(pid);
  if (!seen || !*seen || !(*seen)->of_our_version || (*seen)->state != AgentState::kClosed)
    return {};
  return agents_threads(pid);
}

}  // namespace stasis
