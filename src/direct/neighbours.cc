#include "direct/neighbours.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/listing.h"
#include "base/printable.h"
#include "checkpoint/driver_obstacles.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_probe.h"
#include "direct/foreign_time.h"
#include "direct/mover_server.h"

namespace stasis {

namespace {

// Programs of other trees that run on these GPUs.
struct Neighbours {
  RestoredNeighbours held_before;
  std::vector<proc::ProcessInfo> others;
};

// Sorts one in that is no mover.
void judge_neighbour(proc::ProcessInfo info, const direct::KnownUsers& users, Neighbours& found) {
  const bool is_foreign = !users.has_owner_of(info.pid);
  std::optional<direct::ForeignTime> time;
  if (is_foreign) time.emplace();
  const auto agent = direct::probe_agent(info.pid, time ? time->until() : Clock::time_point::max());
  if (!agent && agent.error().code == ErrorCode::kTimeout) {
    found.held_before.unasked.push_back(std::move(info));
    return;
  }
  const bool is_ours = agent && *agent && (*agent)->of_our_version;
  if (is_ours && direct::is_away((*agent)->state)) return;
  auto& restored = is_foreign ? found.held_before.foreign : found.held_before.known;
  (is_ours && (*agent)->held_before ? restored : found.others).push_back(std::move(info));
}

Neighbours neighbours(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                      std::set<GpuUuid> gpus) {
  Neighbours found;
  const auto use = env.driver.memory_by_process();
  if (!use) return found;
  std::set<Pid> own;
  const direct::KnownUsers users(ours);
  for (const proc::ProcessInfo& info : ours) {
    own.insert(info.pid);
    if (const auto at = use->find(info.pid); at != use->end())
      for (const GpuUse& one : at->second)
        gpus.insert(one.gpu);
  }
  for (const auto& [pid, uses] : *use) {
    const bool beside = !own.contains(pid) &&
                        std::any_of(uses.begin(), uses.end(),
                                    [&](const GpuUse& one) { return gpus.contains(one.gpu); });
    if (!beside) continue;
    auto info = proc::ProcFs().process(pid);
    // The driver knows of processes that this user is not shown.
    if (!info && info.error().code == ErrorCode::kNotPermitted) {
      proc::ProcessInfo& unseen = found.others.emplace_back();
      unseen.pid = pid;
      unseen.comm = "of another user";
      continue;
    }
    if (!info || info->comm == direct::kMoverName) continue;
    judge_neighbour(std::move(*info), users, found);
  }
  return found;
}

bool is_rank(const proc::ProcessInfo& info) {
  return has_nccl_peers(proc::ProcFs(), info.pid).value_or(false);
}

}  // namespace

RestoredNeighbours restored_neighbours(const Environment& env,
                                       const std::vector<proc::ProcessInfo>& ours,
                                       const std::set<GpuUuid>& gpus) {
  return neighbours(env, ours, gpus).held_before;
}

std::string named(const std::vector<proc::ProcessInfo>& who) {
  std::vector<std::string> names;
  for (const proc::ProcessInfo& one : who)
    names.push_back(fmt::format("{} ({})", one.pid.value, printable(one.comm)));
  return listed(names, ", ");
}

void tell_of_restored(const Environment& env, const std::vector<proc::ProcessInfo>& who) {
  if (who.empty()) return;
  env.tell(fmt::format(
      "on the same GPU runs a program that was suspended or restored before, and that this tool "
      "cannot hold meanwhile: process {}; if it runs a kernel of over 4 s now, the driver may end "
      "it (Xid 109); suspend it first",
      named(who)));
}

void tell_of_unasked(const Environment& env, const std::vector<proc::ProcessInfo>& who) {
  if (who.empty()) return;
  env.tell(fmt::format(
      "on the same GPU run programs of other users that could not be asked within a second whether "
      "they were suspended or restored before: process {}; if one was and runs a kernel of over "
      "4 s now, the driver may end it (Xid 109)",
      named(who)));
}

void tell_of_neighbours_to_come(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                                std::set<GpuUuid> gpus) {
  const Neighbours found = neighbours(env, ours, std::move(gpus));
  if (found.others.empty()) return;
  env.tell(fmt::format(
      "it comes back to a GPU that another program uses: process {}; if it runs a kernel of over "
      "4 s then, as one does that waits for another rank, the driver may end it (Xid 109); end or "
      "suspend the other one first",
      named(found.others)));
}

Result<void> refuse_beside_ranks(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                                 std::set<GpuUuid> gpus) {
  if (std::none_of(ours.begin(), ours.end(), is_rank)) return {};
  const auto restored = neighbours(env, ours, std::move(gpus)).held_before;
  std::vector<proc::ProcessInfo> ranks = restored.known;
  ranks.insert(ranks.end(), restored.foreign.begin(), restored.foreign.end());
  std::erase_if(ranks, [](const proc::ProcessInfo& one) { return !is_rank(one); });
  if (ranks.empty()) return {};
  return fail(
      ErrorCode::kBusy,
      fmt::format("on the same GPUs run ranks of another job that was suspended or restored "
                  "before: process {}; kernels of ranks wait for each other, the GPU cannot be "
                  "switched away from those of either job, and both would be lost (Xid 109)",
                  named(ranks)),
      "suspend that job first, or let this one come back to other GPUs (--device-map)");
}

Result<void> refuse_recovery_beside_ranks(const Environment& env, const JournalRecord& record) {
  std::vector<proc::ProcessInfo> ours;
  std::set<GpuUuid> gpus;
  bool any = false;
  bool all_known = true;
  for (const JournalTarget& target : record.targets) {
    const auto process = Process::open(env.driver, target.pid);
    if (!process || !may_be_same(target, process->id())) continue;
    ours.push_back(process->info());
    const auto state = process->cuda_state();
    if (target.initial != CudaState::kRunning || !state || *state != CudaState::kCheckpointed)
      continue;
    any = true;
    const auto memory = recall_suspended(*process);
    if (!memory || memory->uses.empty()) all_known = false;
    for (const GpuUse& use : memory ? memory->uses : std::vector<GpuUse>())
      gpus.insert(use.gpu);
  }
  if (!any) return {};
  // Where a suspend was cut short before it has written down what they had, it may be any GPU.
  if (const auto all = env.driver.gpus(); all && !all_known) {
    for (const Gpu& gpu : *all)
      gpus.insert(gpu.uuid);
  }
  auto alone = refuse_beside_ranks(env, ours, gpus);
  if (!alone) {
    alone.error().remedy =
        fmt::format("suspend that job first, then `stasis recover {}`: until then it stands still",
                    record.root.value);
  }
  return alone;
}

}  // namespace stasis
