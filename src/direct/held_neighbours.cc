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
#include "proc/cgroup.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using std::chrono::milliseconds;

namespace {

// An agent with another peer than this is being suspended or resumed by that.
constexpr milliseconds kFindTime{500};
constexpr milliseconds kTellAfter{1000};
// The gate opens by itself when this is no peer any more; ours stand still meanwhile.
constexpr milliseconds kOpenTime{500};

std::optional<AgentClient> agent_of(const proc::ProcessInfo& info) {
  const auto pidfd = Pidfd::open(info.pid);
  if (!pidfd) return std::nullopt;
  const auto now = proc::ProcFs().process(info.pid);
  if (!now || now->id() != info.id()) return std::nullopt;
  auto found = AgentClient::find(info.pid, *pidfd, kFindTime);
  return found ? std::move(*found) : std::nullopt;
}

// No thread of it runs, so that it begins no kernel, and its agent does not answer.
bool stands_still(Pid pid) {
  const auto state = proc::ProcFs().state(pid);
  return (state && (*state == 'T' || *state == 't')) || proc::frozen_cgroup(pid).has_value();
}

// Only work that does not end is a failure: what else is wrong with another program is not to end
// the operation on ours.
class NeighbourRank final : public Rank {
 public:
  explicit NeighbourRank(AgentClient& agent) : gate_(agent), agent_(&agent) {}

  bool is_out_of_reach() const { return is_out_of_reach_; }
  bool has_ended() const { return gate_.gone() || agent_->has_left(); }

  Result<void> hold(milliseconds left, bool again, const Interrupt& interrupt) override {
    if (is_out_of_reach_) return {};
    auto done = gate_.hold(left, again, interrupt);
    const bool is_stop = !done && (done.error().code == ErrorCode::kTimeout ||
                                   done.error().code == ErrorCode::kInterrupted);
    return is_stop ? done : note(done);
  }
  Result<void> go_on() override { return is_out_of_reach_ ? Result<void>() : note(gate_.go_on()); }
  Result<void> release() override {
    return is_out_of_reach_ ? Result<void>() : note(gate_.release());
  }
  bool gone() const override { return is_out_of_reach_ || gate_.gone(); }

 private:
  Result<void> note(const Result<void>& done) {
    is_out_of_reach_ = !done;
    return {};
  }

  GateRank gate_;
  AgentClient* agent_;
  bool is_out_of_reach_ = false;
};

struct Neighbour {
  proc::ProcessInfo info;
  AgentClient agent;
};

// Drops those that cannot be held; the ones among them that still run go to `out_of_reach`.
QuiesceRound close_gates(std::vector<Neighbour>& all, milliseconds longest,
                         const Interrupt& interrupt, std::vector<proc::ProcessInfo>& out_of_reach) {
  std::deque<NeighbourRank> gates;
  std::vector<Rank*> ranks;
  for (Neighbour& one : all)
    ranks.push_back(&gates.emplace_back(one.agent));
  auto round = quiesce_ranks(ranks, longest, interrupt);
  std::vector<Neighbour> left;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (gates[i].has_ended()) continue;
    if (gates[i].is_out_of_reach())
      out_of_reach.push_back(all[i].info);
    else
      left.push_back(std::move(all[i]));
  }
  all = std::move(left);
  return round;
}

std::string names_of(const std::vector<Neighbour>& all) {
  std::vector<proc::ProcessInfo> infos;
  for (const Neighbour& one : all)
    infos.push_back(one.info);
  return named(infos);
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
  std::vector<Neighbour> all;
  std::vector<proc::ProcessInfo> out_of_reach;
  for (const proc::ProcessInfo& info : restored) {
    auto agent = stands_still(info.pid) ? std::nullopt : agent_of(info);
    if (!agent)
      out_of_reach.push_back(info);
    else if (!direct::is_away(agent->state()))  // suspended since it was looked for
      all.push_back({info, std::move(*agent)});
  }
  const milliseconds first = std::min(longest, kTellAfter);
  QuiesceRound round;
  round.all_quiesced = all.empty();
  if (!all.empty()) round = close_gates(all, first, env.interrupt, out_of_reach);
  if (round.result && !round.all_quiesced && first < longest && !all.empty()) {
    env.tell(
        fmt::format("waiting for the GPU work of process {}, which was suspended or restored "
                    "before and uses the same GPU",
                    names_of(all)));
    round = close_gates(all, longest - first, env.interrupt, out_of_reach);
  }
  tell_of_restored(env, out_of_reach);
  if (all.empty()) return held;
  if (round.result && round.all_quiesced) {
    for (Neighbour& one : all)
      held.agents_.push_back(std::move(one.agent));
    return held;
  }
  const std::string names = names_of(all);
  all.clear();  // they are released
  STASIS_TRY(env.interrupt.check());
  STASIS_TRY(std::move(round.result));
  return fail(
      ErrorCode::kBusy,
      fmt::format("process {} was suspended or restored before, uses the same GPU, and its work "
                  "there has not ended for {} s: a context that is made there meanwhile may end it "
                  "(Xid 109)",
                  names, std::chrono::duration_cast<std::chrono::seconds>(longest).count()),
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
    agent.begin(AgentCommand::kOpen, direct::kKeepBuffer);
  // One that does not answer is not to keep the others, nor who waits for this.
  const auto deadline = Clock::now() + kOpenTime;
  for (AgentClient& agent : agents_) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    (void)agent.finish(std::max(left, milliseconds(1)));
  }
  agents_.clear();
}

}  // namespace stasis
