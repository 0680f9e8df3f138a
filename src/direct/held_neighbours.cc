#include "direct/held_neighbours.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/threads.h"
#include "direct/agent_set.h"
#include "direct/foreign_time.h"
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

// Each costs descriptors and a thread, and a user may have any number.
constexpr std::size_t kMostForeign = 64;

std::optional<AgentClient> agent_of(const proc::ProcessInfo& info, milliseconds timeout,
                                    Clock::time_point until = Clock::time_point::max()) {
  const auto pidfd = Pidfd::open(info.pid);
  if (!pidfd) return std::nullopt;
  const auto now = proc::ProcFs().process(info.pid);
  if (!now || now->id() != info.id()) return std::nullopt;
  auto found = AgentClient::find(info.pid, *pidfd, timeout, until);
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

milliseconds time_until(Clock::time_point end) {
  return std::max(std::chrono::ceil<milliseconds>(end - Clock::now()), milliseconds(0));
}

// One of a foreign user: nothing of what its agent says or does not say is waited for longer than
// `until`, or a failure.
class ForeignRank final : public Rank {
 public:
  ForeignRank(AgentClient& agent, Clock::time_point until) : agent_(&agent), until_(until) {}

  bool is_out_of_reach() const { return is_out_of_reach_; }
  bool has_ended() const { return !agent_->pidfd().alive() || agent_->has_left(); }

  Result<void> hold(milliseconds /*left*/, bool /*again*/, const Interrupt& interrupt) override {
    if (is_out_of_reach_) return {};
    // So much before the end that its answer is there by then.
    constexpr milliseconds kAnswer{50};
    const milliseconds left = time_until(until_);
    agent_->begin(AgentCommand::kClose,
                  static_cast<std::uint64_t>(std::max(left - kAnswer, milliseconds(1)).count()));
    auto done = agent_->finish_unless(interrupt, left);
    if (!done && !interrupt.check()) return done;
    is_out_of_reach_ = !done;
    return {};
  }
  Result<void> go_on() override {
    if (is_out_of_reach_) return {};
    is_out_of_reach_ = !agent_->ask(AgentCommand::kOpen, direct::kKeepBuffer, time_until(until_));
    return {};
  }
  // Its gate opens when this is its peer no more.
  Result<void> release() override { return {}; }
  bool gone() const override { return is_out_of_reach_ || !agent_->pidfd().alive(); }

 private:
  AgentClient* agent_;
  Clock::time_point until_;
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

void wait_for_opened(std::vector<AgentClient>& agents, Clock::time_point until) {
  for (AgentClient& agent : agents)
    (void)agent.finish(std::max(time_until(until), milliseconds(1)));
}

std::string names_of(const std::vector<Neighbour>& all) {
  std::vector<proc::ProcessInfo> infos;
  for (const Neighbour& one : all)
    infos.push_back(one.info);
  return named(infos);
}

std::vector<AgentClient> agents_of(std::vector<Neighbour> all) {
  std::vector<AgentClient> out;
  for (Neighbour& one : all)
    out.push_back(std::move(one.agent));
  return out;
}

Result<std::vector<AgentClient>> hold_known(const Environment& env,
                                            const std::vector<proc::ProcessInfo>& restored,
                                            milliseconds longest,
                                            std::vector<proc::ProcessInfo>& out_of_reach) {
  std::vector<Neighbour> all;
  for (const proc::ProcessInfo& info : restored) {
    auto agent = stands_still(info.pid) ? std::nullopt : agent_of(info, kFindTime);
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
  if (all.empty() || (round.result && round.all_quiesced)) return agents_of(std::move(all));
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

// The agents of those that are there and can be asked, all at the same time.
std::vector<Neighbour> find_foreign(const std::vector<proc::ProcessInfo>& asked,
                                    Clock::time_point until,
                                    std::vector<proc::ProcessInfo>& out_of_reach) {
  std::vector<std::optional<AgentClient>> agents(std::min(asked.size(), kMostForeign));
  at_once(agents.size(), [&](std::size_t i) {
    const milliseconds left = time_until(until);
    if (left.count() == 0 || stands_still(asked[i].pid)) return;
    agents[i] = agent_of(asked[i], std::min(kFindTime, left), until);
  });
  std::vector<Neighbour> found;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    if (i >= agents.size() || !agents[i])
      out_of_reach.push_back(asked[i]);
    else if (!direct::is_away(agents[i]->state()))
      found.push_back({asked[i], std::move(*agents[i])});
  }
  return found;
}

std::vector<AgentClient> hold_foreign(const std::vector<proc::ProcessInfo>& restored,
                                      const Interrupt& interrupt,
                                      std::vector<proc::ProcessInfo>& out_of_reach) {
  if (restored.empty()) return {};
  const direct::ForeignTime time;
  // An operation may hold them more than once, and is to have time then, too.
  const auto begun = Clock::now();
  const auto end = begun + (time.until() - begun) / 2;
  auto all = find_foreign(restored, end, out_of_reach);
  std::deque<ForeignRank> gates;
  std::vector<Rank*> ranks;
  for (Neighbour& one : all)
    ranks.push_back(&gates.emplace_back(one.agent, end));
  const milliseconds left = time_until(end);
  const auto round =
      left.count() == 0 || all.empty() ? QuiesceRound() : quiesce_ranks(ranks, left, interrupt);
  std::vector<AgentClient> held;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (gates[i].has_ended()) continue;
    if (gates[i].is_out_of_reach() || !round.all_quiesced)
      out_of_reach.push_back(all[i].info);
    else
      held.push_back(std::move(all[i].agent));
  }
  return held;
}

}  // namespace

Result<HeldNeighbours> HeldNeighbours::hold(const Environment& env,
                                            const std::vector<proc::ProcessInfo>& ours,
                                            const std::set<GpuUuid>& gpus, milliseconds longest) {
  return hold(env, restored_neighbours(env, ours, gpus), longest);
}

Result<HeldNeighbours> HeldNeighbours::hold(const Environment& env,
                                            const RestoredNeighbours& restored,
                                            milliseconds longest) {
  HeldNeighbours held;
  std::vector<proc::ProcessInfo> out_of_reach;
  auto known = hold_known(env, restored.known, longest, out_of_reach);
  if (known) {
    held.agents_ = std::move(*known);
    held.foreign_ = hold_foreign(restored.foreign, env.interrupt, out_of_reach);
  }
  tell_of_restored(env, out_of_reach);
  tell_of_unasked(env, restored.unasked);
  if (!known) return fail(std::move(known.error()));
  if (!restored.foreign.empty()) STASIS_TRY(env.interrupt.check());
  return held;
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
  for (std::vector<AgentClient>* agents : {&agents_, &foreign_})
    for (AgentClient& agent : *agents)
      agent.begin(AgentCommand::kOpen, direct::kKeepBuffer);
  // One that does not answer is not to keep the others, nor who waits for this.
  wait_for_opened(agents_, Clock::now() + kOpenTime);
  if (!foreign_.empty()) {
    const direct::ForeignTime time;
    wait_for_opened(foreign_, std::min(time.until(), Clock::now() + kOpenTime));
  }
  agents_.clear();
  foreign_.clear();
}

}  // namespace stasis
