#include "direct/held_neighbours.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "direct/agent_set.h"
#include "direct/gate_rank.h"
#include "direct/memory_state.h"
#include "direct/neighbours.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using std::chrono::milliseconds;

namespace {

// An agent with another peer than this is being suspended or resumed by that.
constexpr milliseconds kFindTime{500};
constexpr milliseconds kTellAfter{1000};

std::optional<AgentClient> agent_of(const proc::ProcessInfo& info) {
  const auto pidfd = Pidfd::open(info.pid);
  if (!pidfd) return std::nullopt;
  const auto now = proc::ProcFs().process(info.pid);
  if (!now || now->id() != info.id()) return std::nullopt;
  auto found = AgentClient::find(info.pid, *pidfd, kFindTime);
  return found ? std::move(*found) : std::nullopt;
}

QuiesceRound close_gates(std::vector<AgentClient>& agents, milliseconds longest,
                         const Interrupt& interrupt) {
  std::deque<GateRank> gates;
  std::vector<Rank*> ranks;
  for (AgentClient& agent : agents)
    ranks.push_back(&gates.emplace_back(agent));
  return quiesce_ranks(ranks, longest, interrupt);
}

}  // namespace

Result<HeldNeighbours> HeldNeighbours::hold(const Environment& env,
                                            const std::vector<proc::ProcessInfo>& ours,
                                            const std::set<GpuUuid>& gpus, milliseconds longest) {
  return hold(env, restored_neighbours(env, ours, gpus), longest);
}

Result<HeldNeighbours> HeldNeighbours::hold(const Environment& env,
                                            const std::vector<proc::ProcessInfo>& restored,
                                            milliseconds longest) {
  HeldNeighbours held;
  std::vector<proc::ProcessInfo> out_of_reach;
  for (const proc::ProcessInfo& info : restored) {
    if (auto agent = agent_of(info))
      held.agents_.push_back(std::move(*agent));
    else
      out_of_reach.push_back(info);
  }
  tell_of_restored(env, out_of_reach);
  if (held.empty()) return held;
  const milliseconds first = std::min(longest, kTellAfter);
  auto round = close_gates(held.agents_, first, env.interrupt);
  if (round.result && !round.all_quiesced && first < longest) {
    env.tell(
        fmt::format("waiting for the GPU work of process {}, which was suspended or restored "
                    "before and uses the same GPU",
                    named(restored)));
    round = close_gates(held.agents_, longest - first, env.interrupt);
  }
  if (round.result && round.all_quiesced) return held;
  held.agents_.clear();  // they are released
  STASIS_TRY(env.interrupt.check());
  STASIS_TRY(std::move(round.result));
  return fail(
      ErrorCode::kBusy,
      fmt::format("process {} was suspended or restored before, uses the same GPU, and its work "
                  "there has not ended for {} s: a context that is made there meanwhile may end it "
                  "(Xid 109)",
                  named(restored),
                  std::chrono::duration_cast<std::chrono::seconds>(longest).count()),
      "try again when its kernel has ended, or suspend it first");
}

HeldNeighbours HeldNeighbours::hold_if_possible(const Environment& env,
                                                const std::vector<proc::ProcessInfo>& ours,
                                                std::set<GpuUuid> gpus, milliseconds longest) {
  if (const auto all = env.driver.gpus(); all && gpus.empty()) {
    for (const Gpu& gpu : *all)
      gpus.insert(gpu.uuid);
  }
  const Interrupt never;
  auto held = hold(env.with(never), ours, gpus, longest);
  if (held) return std::move(*held);
  env.tell(held.error().message);
  return {};
}

Result<void> hold_neighbours(MemoryState& state, const Environment& env,
                             const std::vector<proc::ProcessInfo>& ours,
                             const std::set<GpuUuid>& gpus, milliseconds longest) {
  if (state.neighbours) return {};
  if (longest.count() == 0) longest = kNeighbourTime;
  STASIS_TRY_ASSIGN(state.neighbours, HeldNeighbours::hold(env, ours, gpus, longest));
  return {};
}

void HeldNeighbours::release() {
  for (AgentClient& agent : agents_)
    (void)agent.ask(AgentCommand::kOpen, direct::kKeepBuffer, kAtOnce);
  agents_.clear();
}

}  // namespace stasis
