#include "direct/move_in.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <map>
#include <span>
#include <string>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/scope_guard.h"
#include "direct/remote_memory.h"
#include "direct/sharing.h"

namespace stasis {
namespace {

using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentState;
using direct::copy_time;

Result<void> repopulate(MemoryState& state) {
  for (;;) {
    auto done = state.agents.repopulate();
    // The prefetched content may take the memory that is missing, whatever the driver calls that.
    if (done || !state.prefetch.release()) return done;
    state.prefetch.leave();
  }
}

// Into the agents that repopulate their memory.
Result<void> copy_in(MemoryState& state, const Interrupt& interrupt) {
  STASIS_TRY(state.agents.allow_pieces());
  std::vector<PiecesAsked> asked;
  std::vector<ContentSources::Found> contents;
  // If the tool is killed, no agent copies by itself beside the mover.
  std::vector<UniqueFd> locks;
  bool from_image = false;
  for (auto& agent : state.agents) {
    if (agent.state() != AgentState::kFilling) continue;
    locks.push_back(agent.lock());
    if (!locks.back().valid()) return fail(errno_error("cannot copy a descriptor", errno));
    STASIS_TRY_ASSIGN(auto content, state.content.content_of(agent));
    if (content.image) from_image = true;
    asked.push_back({&agent, !content.image});
    contents.push_back(std::move(content));
  }
  STASIS_TRY_ASSIGN(auto taken, take_checked(asked));
  std::vector<direct::Segment> segments;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const auto& [image, stream] = contents[i];
    const std::uint64_t base =
        image ? state.content.composite()->add_stream(image, stream)
              : state.content.add_buffer(*asked[i].agent, BufferPages::kWritten);
    append(segments, std::move(taken[i].segments), base);
  }
  const auto deadline =
      Clock::now() + (from_image ? kSlowDisk : 1) * copy_time(state.agents.bytes());
  const bool any = !segments.empty();
  state.mover->hold(std::move(locks));
  auto copied =
      state.mover->copy_in(std::move(segments), *state.content.composite(), interrupt, deadline);
  // If the copy has begun, the mover has used up the prefetched content.
  if (copied && any)
    state.prefetch.used();
  else
    (void)state.prefetch.release();
  state.prefetch.leave();
  STASIS_TRY(std::move(copied));
  return {};
}

// By the agent alone, which needs no mover and takes its time. Its gate stays closed.
Result<void> repopulate(const MemoryState& state, AgentClient& agent) {
  // A page answers, too, when another process has it.
  STASIS_TRY(agent.address_space()->check_current());
  return agent.repopulate([&state](const AgentClient& held) -> Result<void> {
    constexpr std::uint64_t kPiece = std::uint64_t{16} << 20;
    STASIS_TRY_ASSIGN(auto content, state.content.content_of(held));
    direct::RemoteMemory buffer(held.address_space(), held.buffer_address(), held.bytes());
    std::vector<std::byte> piece(std::min(kPiece, held.bytes()));
    for (std::uint64_t offset = 0; offset < held.bytes(); offset += kPiece) {
      const std::span<std::byte> part(piece.data(), std::min(kPiece, held.bytes() - offset));
      auto done = content.image->read(content.stream * ImageContent::kGap + offset, part);
      if (done) done = buffer.write(offset, part);
      if (!done) return done;
    }
    return {};
  });
}

// Bytes whose content is in images. Where one is not known, all is left as it is.
Result<std::uint64_t> bytes_in_images(MemoryState& state) {
  std::uint64_t bytes = 0;
  for (const auto& agent : state.agents) {
    STASIS_TRY_ASSIGN(auto content, state.content.content_of(agent));
    if (!content.image) continue;
    state.content.need_image(true);
    bytes += agent.bytes();
  }
  return bytes;
}

// All that is made on the GPUs from here on is made in any case.
HeldNeighbours hold_beside(MemoryState& state, const Environment& env,
                           const std::vector<const Process*>& processes) {
  if (state.mover.gpus().empty()) state.mover.use_gpus_of(processes, {});
  std::vector<proc::ProcessInfo> ours;
  for (const Process* process : processes)
    ours.push_back(process->info());
  const auto& gpus = state.mover.gpus();
  return HeldNeighbours::hold_if_possible(env, ours, {gpus.begin(), gpus.end()}, kNeighbourTime);
}

// What processes share is theirs again, before any of them runs.
Result<void> attach_all(MemoryState& state) {
  auto done = attach_all(state.agents, state.lenders, state.driver_threads);
  state.lenders.clear();
  return done;
}

bool any_detached(const AgentSet& agents) {
  return std::any_of(agents.begin(), agents.end(),
                     [](const AgentClient& agent) { return agent.detached_count() != 0; });
}

// The agents whose memory is away. A process that was stopped before anything was evicted runs on:
// the content of its buffer is not that of its memory. But not before the others have again what
// they share.
Result<void> find_evicted(MemoryState& state, const Environment& env,
                          const std::vector<const Process*>& processes) {
  state.agents.clear();
  STASIS_TRY(state.agents.find_evicted(env, processes));
  const bool any_misses = any_detached(state.agents);
  for (auto& agent : state.agents) {
    if (any_misses || agent.state() != AgentState::kClosed) continue;
    STASIS_TRY(agent.ask(AgentCommand::kOpen, 0, kMapping));
  }
  state.agents.drop_running();
  find_lenders(state, env, processes);
  return note_driver_threads(state.agents, processes, state.driver_threads);
}

}  // namespace

void find_lenders(MemoryState& state, const Environment& env,
                  const std::vector<const Process*>& processes) {
  const bool any = any_detached(state.agents);
  for (const Process* process : processes) {
    if (!any || !process->alive() || state.agents.has(process->pid())) continue;
    auto agent = find_agent(env, *process, false);
    if (agent && *agent && (*agent)->ask(AgentCommand::kNone, 0, kAtOnce) &&
        (*agent)->share_count() != 0)
      state.lenders.add(std::move(**agent));
  }
}

Result<std::uint64_t> move_in(MemoryState& state, const Environment& env,
                              const std::vector<const Process*>& processes, Phases& phases,
                              IfItFails if_it_fails, GpuRoom room) {
  const bool stops = if_it_fails == IfItFails::kCallerEndsThem;
  AgentSet& agents = state.agents;
  // Without a peer they try it again by themselves.
  const auto leave = [&](Error why) -> Result<std::uint64_t> {
    agents.clear();
    return fail(std::move(why));
  };
  STASIS_TRY(find_evicted(state, env, processes));
  if (agents.empty()) return 0;
  auto in_images = bytes_in_images(state);
  if (!in_images) return leave(std::move(in_images.error()));
  const std::uint64_t moved = agents.bytes();
  if (!state.neighbours) state.neighbours = hold_beside(state, env, processes);
  const ScopeGuard neighbours_go_on([&] { state.neighbours.reset(); });
  phases.begin("repopulate");
  if (auto allowed = fault(FaultPoint::kDirectRepopulate); !allowed)
    return leave(std::move(allowed.error()));
  state.prefetch.reserve_both();
  if (auto done = repopulate(state); !done) return leave(std::move(done.error()));
  room.leave();
  fault_only(FaultPoint::kDirectRepopulated);
  phases.begin("copy in");
  auto done = state.mover.take_to_bring_back(env, processes, moved, *in_images);
  const Interrupt never;
  // There may be nothing left to copy that would see the interrupt.
  if (done && stops) done = env.interrupt.check();
  if (done && state.mover) done = copy_in(state, stops ? env.interrupt : never);
  // The image says the same to the agents; and a stop that the user requests counts.
  if (!done && (done.error().code == ErrorCode::kImageCorrupt ||
                done.error().code == ErrorCode::kInterrupted))
    return leave(std::move(done.error()));
  // One that has gone is the whole reason.
  const bool all_alive = std::all_of(
      agents.begin(), agents.end(), [](const AgentClient& agent) { return agent.pidfd().alive(); });
  if (!done && all_alive) env.tell("the processes copy by themselves: " + done.error().to_string());
  if (!state.mover || !done) {
    STASIS_TRY(bring_back_all(state, if_it_fails));
    if (auto gone = std::exchange(state.gone, std::nullopt)) return fail(std::move(*gone));
    return moved;
  }
  fault_only(FaultPoint::kDirectFilled);
  if (auto shared = attach_all(state); !shared) return leave(std::move(shared.error()));
  phases.begin("open");
  done = agents.open();
  phases.runs();
  agents.clear();
  fault_only(FaultPoint::kDirectOpened);
  STASIS_TRY(std::move(done));
  state.content.need_image(false);
  return moved;
}

namespace {

// What helps, and then the command that finishes what was begun.
std::string then_recover(const std::string& remedy, Pid pid) {
  return fmt::format("{}{}`stasis recover {}`", remedy, remedy.empty() ? "" : "; then ", pid.value);
}

// One run of bring_back_all().
class BringBack {
 public:
  explicit BringBack(MemoryState& state) : state_(state), together_(any_detached(state.agents)) {}

  Result<void> run(IfItFails if_it_fails) {
    for (auto& agent : state_.agents)
      agent.heed_second_only();
    if (state_.prefetch.any() && state_.content.needs_image()) state_.prefetch.collect();
    // The mover copies, because it needs no host memory; what it cannot do, the agents do. Only for
    // content of an image: the agents copy what is in their own buffers sooner.
    if (state_.mover && state_.content.needs_image()) copy_by_mover();
    // The agents need that room.
    (void)state_.prefetch.release();
    for (auto& agent : state_.agents)
      if (together_ && agent.pidfd().alive() && !repopulated_.contains(agent.pid()))
        repopulated_.emplace(agent.pid(), repopulate_one(agent));
    shared_ = attach_all(state_);
    if (!shared_) {
      messages_ = shared_.error().message;
      remedies_ = shared_.error().remedy;
    }
    for (auto& agent : state_.agents) {
      if (!agent.pidfd().alive()) continue;
      auto back = let_go_on(agent);
      if (back) continue;
      if (if_it_fails == IfItFails::kCallerEndsThem &&
          back.error().code == ErrorCode::kImageCorrupt) {
        state_.agents.clear();
        return back;
      }
      messages_ += (messages_.empty() ? "" : "; ") + back.error().message;
      remedies_ = then_recover(back.error().remedy, agent.pid());
    }
    state_.agents.clear();
    if (!messages_.empty())
      return fail(ErrorCode::kNotRolledBack, std::move(messages_), std::move(remedies_));
    state_.content.need_image(false);
    return {};
  }

 private:
  void copy_by_mover() {
    state_.prefetch.reserve_both();
    (void)repopulate(state_);
    if (!copy_in(state_, never_)) return;
    for (auto& agent : state_.agents) {
      if (agent.state() != AgentState::kFilling) continue;
      if (together_)
        repopulated_.emplace(agent.pid(), Result<void>());
      else
        (void)agent.ask(AgentCommand::kOpen, 0, kMapping);
    }
  }

  // An agent maps once more what it copies, which needs address space; a mover does so elsewhere.
  Result<void> repopulate_one(AgentClient& agent) {
    auto back = repopulate(state_, agent);
    if (!back && state_.mover && agent.state() == AgentState::kFilling && copy_in(state_, never_))
      back = {};
    return back;
  }

  // An error is what is to be said of it.
  Result<void> let_go_on(AgentClient& agent) {
    const auto before = repopulated_.find(agent.pid());
    auto back = before == repopulated_.end() ? repopulate_one(agent) : std::move(before->second);
    // Beside it others miss what they had of it, or of each other.
    if (back && !shared_ && agent.share_count() != 0) {
      remedies_ = then_recover(shared_.error().remedy, agent.pid());
      return {};
    }
    if (back && agent.state() != AgentState::kRunning)
      back = agent.ask(AgentCommand::kOpen, 0, kMapping);
    if (back || !agent.pidfd().alive()) return {};
    // That is said already.
    if (!shared_ && agent.detached_count() != 0) {
      remedies_ = then_recover(shared_.error().remedy, agent.pid());
      return {};
    }
    // Another program has taken its place, and runs.
    if (back.error().code == ErrorCode::kProcessGone) {
      state_.gone = std::move(back.error());
      return {};
    }
    return back;
  }

  MemoryState& state_;
  const Interrupt never_;
  // What others miss of an agent's memory has to be there again before they can have it, and no
  // program runs before they have. Otherwise one after the other, so that no two need a buffer at
  // the same time.
  const bool together_;
  std::map<Pid, Result<void>> repopulated_;
  Result<void> shared_;  // what they share is theirs again
  std::string messages_;
  std::string remedies_;
};

}  // namespace

Result<void> bring_back_all(MemoryState& state, IfItFails if_it_fails) {
  return BringBack(state).run(if_it_fails);
}

Result<void> roll_back(MemoryState& state) {
  // If the content was copied, all is as with the copy first; if not, the agents take it from what
  // they have pinned.
  state.mover.wait_for_copy();
  if (state.mover.copied() && *state.mover.copied()) (void)state.agents.unpin();
  return bring_back_all(state, IfItFails::kTheyStandStill);
}

}  // namespace stasis
