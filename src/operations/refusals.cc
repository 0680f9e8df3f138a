#include "operations/refusals.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/driver_obstacles.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_client.h"
#include "direct/left_to_driver.h"
#include "direct/sharing.h"
#include "direct/unknown_sharing.h"
#include "operations/rollback.h"
#include "proc/bounded_seize.h"

namespace stasis {

Result<void> refuse_driver_obstacles(const Environment& env, const std::vector<TreeMember>& members,
                                     bool ignore, std::set<Pid>& checked, bool quiesced) {
  std::vector<proc::ProcessInfo> fresh;
  for (const TreeMember& member : members) {
    if (member.initial != CudaState::kRunning && member.initial != CudaState::kLocked) continue;
    if (checked.insert(member.process.pid()).second) fresh.push_back(member.process.info());
  }
  STASIS_TRY_ASSIGN(auto found, find_obstacles(env.driver, proc::ProcFs(), fresh));
  drop_lifted(found, quiesced);
  if (found.empty()) return {};
  Error why = describe_obstacles(found, fresh);
  if (ignore) {
    env.tell("ignored, as asked: " + why.message);
    return {};
  }
  why.remedy += fmt::format("; if you know better: {}", option_of(Override::kIgnoreObstacles));
  return fail(std::move(why));
}

Result<void> refuse_rdma(const Environment& env, const ProcessTree& tree, bool ignore) {
  const auto infos = tree.infos();
  STASIS_TRY_ASSIGN(const auto found, find_rdma(proc::ProcFs(), infos));
  if (found.empty()) return {};
  Error why = describe_obstacles(found, infos);
  if (ignore) {
    env.tell("ignored, as asked: " + why.message);
    return {};
  }
  why.remedy +=
      fmt::format("; if it has no connections by them: {}", option_of(Override::kIgnoreObstacles));
  return fail(std::move(why));
}

namespace {

// The threads of a process that is traced cannot be kept still.
Result<void> refuse_tracers(const std::vector<TreeMember>& members) {
  const proc::ProcFs procfs;
  for (const TreeMember& member : members) {
    if (!member.initial || *member.initial == CudaState::kCheckpointed) continue;
    const Pid pid = member.process.pid();
    const auto tracer = procfs.tracer(pid);
    if (!tracer) continue;
    return fail(
        refusal({"tracer", Severity::kRed, pid,
                 fmt::format("process {} ({}) is being traced by process {} (CRIU, or a debugger)",
                             pid.value, member.process.info().comm, *tracer),
                 "wait for it to end, or detach it"},
                ErrorCode::kBusy));
  }
  return {};
}

// What agents know of the sharing of their programs' memory, whether the mover or the driver is to
// move it.
Result<void> refuse_open_elsewhere(const Environment& env, const std::vector<TreeMember>& members,
                                   bool ignore) {
  std::vector<std::pair<Pid, std::uint32_t>> pieces;
  AgentSet agents;
  // What one that does not answer shares is not known; the others' memory then seems to be of none.
  Result<void> unknown;
  for (const TreeMember& member : members) {
    if (member.initial != CudaState::kRunning) continue;
    auto agent = find_agent(env, member.process, true);
    if (!agent && is_held_up(agent.error())) return fail(std::move(agent.error()));
    // move_out() says what is wrong with those.
    if (!agent) {
      unknown = fail(std::move(agent.error()));
      continue;
    }
    if (!*agent) continue;
    // Nothing is touched yet.
    (*agent)->heed(&env.interrupt, direct::AgentClient::Heeds::kFirst);
    auto asked = (*agent)->ask(direct::AgentCommand::kNone, 0, kAtOnce);
    if (!asked && is_held_up(asked.error())) return asked;
    if (!asked) {
      unknown = std::move(asked);
      continue;
    }
    pieces.emplace_back(member.process.pid(), (*agent)->driver_share_count());
    // Its peer was killed, and it is about to make the program run by itself. Done now, so that the
    // driver does not come in between; what cannot be done now it goes on trying.
    const auto state = (*agent)->state();
    const bool undoes = state != direct::AgentState::kRunning && state != direct::AgentState::kHeld;
    if (undoes && !(*agent)->content_is_elsewhere() && (*agent)->detached_count() == 0 &&
        check_size(**agent, env.driver))
      (void)(*agent)->bring_back();
    agents.add(std::move(**agent));
  }
  STASIS_TRY(refuse_shared(env, pieces, ignore));
  if (ignore) return {};
  STASIS_TRY(refuse_multicast(agents));
  STASIS_TRY_ASSIGN(const auto shares, ask_for_settled_shares(agents, env.interrupt));
  auto allowed = check_sharing(shares);
  return !allowed && !unknown ? unknown : allowed;
}

// A user who knows better has said so, and nothing inside the programs is asked.
Result<void> refuse_unknown_sharing(const Environment& env, const ProcessTree& tree, bool ignore) {
  if (ignore) return {};
  auto found = find_unknown_sharing(tree.members(), env.driver.info().simulated);
  const auto red = std::stable_partition(found.begin(), found.end(), [](const Obstacle& one) {
    return one.severity != Severity::kRed;
  });
  if (red != found.begin())
    env.tell(describe_obstacles(std::span(found.begin(), red), tree.infos()).message);
  found.erase(found.begin(), red);
  if (found.empty()) return {};
  Error why = describe_obstacles(found, tree.infos());
  why.remedy += fmt::format("; if they share none: {}", option_of(Override::kIgnoreObstacles));
  return fail(std::move(why));
}

}  // namespace

Result<void> refuse_obstacles(const Environment& env, OpenedTree& opened, bool ignore) {
  auto checked = std::make_shared<std::set<Pid>>();
  auto clear = refuse_tracers(opened.tree.members());
  if (clear) clear = refuse_driver_obstacles(env, opened.tree.members(), ignore, *checked);
  if (clear) clear = refuse_open_elsewhere(env, opened.tree.members(), ignore);
  if (clear) clear = refuse_unknown_sharing(env, opened.tree, ignore);
  if (!clear && opened.journal->inherited().empty()) {
    opened.tree.dismiss();  // no process has been touched
    opened.journal->finish();
    return clear;
  }
  // By a killed operation one has.
  if (!clear) return fail(roll_back(env, opened, std::move(clear.error())));
  opened.tree.on_members_changed = [&env, ignore, checked, update = opened.tree.on_members_changed](
                                       const std::vector<TreeMember>& members) -> Result<void> {
    auto fine = refuse_driver_obstacles(env, members, ignore, *checked);
    return fine ? update(members) : fine;
  };
  return {};
}

Result<void> refuse_unstoppable(const ProcessTree& tree) {
  for (const TreeMember& member : tree.members()) {
    if (member.initial && member.process.alive())
      STASIS_TRY(proc::check_can_be_stopped(member.process.pid()));
  }
  return {};
}

Result<void> check_content(const ProcessTree& tree, const std::string& remedy,
                           const ImageContent* known, bool remembered) {
  for (const TreeMember& member : tree.members()) {
    if (!member.initial || !member.process.alive()) continue;
    STASIS_TRY_ASSIGN(auto agent, direct::probe_agent(member.process.pid()));
    if (!agent || agent->content_id == direct::ContentId{}) continue;
    if (known != nullptr && agent->content_id == known->id()) continue;
    const auto memory = recall_suspended(member.process);
    const auto images = remembered && memory ? find_content(memory->image)
                                             : std::vector<std::shared_ptr<ImageContent>>();
    if (std::any_of(images.begin(), images.end(),
                    [&](const auto& image) { return image->id() == agent->content_id; })) {
      continue;
    }
    const std::string where = memory && !memory->image.empty() ? memory->image : "an image";
    return fail(ErrorCode::kBusy,
                fmt::format("the content of process {}'s GPU memory is in {} and nowhere else",
                            member.process.pid().value, where),
                "bring it back first: " + remedy);
  }
  return {};
}

}  // namespace stasis
