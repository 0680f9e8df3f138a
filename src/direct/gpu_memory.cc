#include "direct/gpu_memory.h"

#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/scope_guard.h"
#include "direct/move_in.h"

namespace stasis {

using direct::AgentState;

Result<void> GpuMemory::finish_out(Phases& phases) {
  const ScopeGuard neighbours_go_on([this] { release_neighbours(); });
  STASIS_TRY(state_->agents.check_sharers_live());
  if (!state_->mover.copies_beside()) return {};
  phases.begin("copy out");
  state_->mover.wait_for_copy();
  release_neighbours();
  Result<void> done = *state_->mover.copied();
  if (state_->mover.found_few_zeros()) state_->agents.note_few_zeros(true);
  if (done) done = fault(FaultPoint::kDirectCopied);
  if (done) done = state_->agents.unpin();
  if (done) done = fault(FaultPoint::kDirectUnpinned);
  return done;
}

Result<void> GpuMemory::hold_neighbours(const Environment& env,
                                        const std::vector<proc::ProcessInfo>& ours,
                                        const std::set<GpuUuid>& gpus,
                                        std::chrono::milliseconds longest) {
  return stasis::hold_neighbours(*state_, env, ours, gpus, longest);
}

void GpuMemory::wait_for_copy(Error& why) {
  state_->mover.wait_for_copy();
  release_neighbours();  // a roll-back holds them itself
  const auto& copied = state_->mover.copied();
  if (!copied || why.retry != Retry::kNone) return;
  if (!*copied)
    why.retry = copied->error().retry;
  else if (why.driver)  // which may refuse because of the copy beside it
    why.retry = Retry::kCopyFirst;
}

void GpuMemory::tell_of_new(const Environment& env, const ProcessTree& tree) {
  std::vector<const Process*> fresh;
  for (const TreeMember& member : tree.members()) {
    if (member.initial == CudaState::kRunning && state_->known.insert(member.process.pid()).second)
      fresh.push_back(&member.process);
  }
  tell_of_driver(env, std::move(fresh), "new in the tree since the agents were asked");
}

Result<void> GpuMemory::expect_agents() {
  for (const auto& agent : state_->agents) {
    if (!agent.pidfd().alive() || agent.can_be_found()) continue;
    Error lost =
        refusal({"lost-agent", Severity::kRed, agent.pid(),
                 fmt::format("process {} has closed the descriptor by which its agent is found",
                             agent.pid().value),
                 "try again: the driver moves its GPU memory now"});
    lost.retry = Retry::kSame;
    return fail(std::move(lost));
  }
  return {};
}

Result<void> GpuMemory::check_found(const Environment& env,
                                    const std::vector<const Process*>& processes) const {
  for (const Process* process : processes) {
    if (!process->alive()) continue;
    auto agent = find_agent(env, *process, true);
    if (!agent && has_nothing_to_bring_back(process->pid())) continue;
    if (!agent) return fail(std::move(agent.error()));
    if (!*agent) continue;
    STASIS_TRY(state_->content.content_of(**agent));
  }
  return {};
}

Result<std::uint64_t> GpuMemory::move_in(const Environment& env,
                                         const std::vector<const Process*>& processes,
                                         Phases& phases, IfItFails if_it_fails, GpuRoom room) {
  return stasis::move_in(*state_, env, processes, phases, if_it_fails, std::move(room));
}

Result<void> GpuMemory::roll_back() { return stasis::roll_back(*state_); }

void GpuMemory::take_held(const Environment& env, const ProcessTree& tree) {
  for (const TreeMember& member : tree.members()) {
    if (member.initial != CudaState::kRunning || !member.process.alive()) continue;
    if (state_->agents.has(member.process.pid())) continue;
    auto agent = find_agent(env, member.process, false);
    if (!agent || !*agent || !check_size(**agent, env.driver)) continue;
    // An agent that waits for content in an image does nothing by itself.
    const AgentState is = (*agent)->state();
    const bool waits = direct::is_away(is) && (*agent)->content_is_elsewhere();
    if (is == AgentState::kHeld || (*agent)->detached_count() != 0 ||
        (waits && state_->content.content_of(**agent)))
      state_->agents.add(std::move(**agent));
  }
  std::vector<const Process*> others;
  for (const TreeMember& member : tree.members())
    if (member.initial == CudaState::kRunning) others.push_back(&member.process);
  find_lenders(*state_, env, others);
  (void)note_driver_threads(state_->agents, others, state_->driver_threads);
}

std::optional<Error> GpuMemory::take_gone() { return std::exchange(state_->gone, std::nullopt); }

const ContentRecord* GpuMemory::content() const {
  const auto& into = state_->content.into();
  return into ? &into->record() : nullptr;
}

std::uint64_t GpuMemory::precopied_bytes() const {
  const auto& into = state_->content.into();
  return into ? into->precopied_bytes() : 0;
}

void GpuMemory::give_back_room() {
  if (const auto& into = state_->content.into()) into->give_back_room();
}

std::uint64_t GpuMemory::reused_bytes() const {
  const auto& into = state_->content.into();
  return into ? into->reused_bytes() : 0;
}

bool GpuMemory::direct_io() const {
  const auto& into = state_->content.into();
  return into && into->direct_io();
}

}  // namespace stasis
