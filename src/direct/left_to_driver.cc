#include "direct/left_to_driver.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/driver_obstacles.h"
#include "direct/heirs.h"
#include "direct/sharing.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using direct::Share;
using direct::ShareRole;

Result<void> refuse_managed(const AgentSet& agents) {
  for (const AgentClient& agent : agents) {
    if (agent.managed_areas() == 0) continue;
    return fail(refusal({"managed-memory", Severity::kRed, agent.pid(),
                         fmt::format("managed memory, which the driver refuses to checkpoint, and "
                                     "which only its agent can give up: process {}",
                                     agent.pid().value),
                         "leave --path driver out", Override::kIgnoreObstacles}));
  }
  return {};
}

namespace {

Result<void> refuse_multicast_of(const AgentClient& agent) {
  if (agent.multicast_count() == 0) return {};
  return fail(
      refusal({"nvlink-multicast", Severity::kRed, agent.pid(),
               fmt::format("NVLink multicast (NVLS, symmetric memory), which the driver cannot "
                           "restore: process {} has {} multicast object(s)",
                           agent.pid().value, agent.multicast_count()),
               "start it with NCCL_NVLS_ENABLE=0, PyTorch's symmetric memory with "
               "TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NVSHMEM with NVSHMEM_DISABLE_NVLS=1",
               Override::kIgnoreObstacles}));
}

}  // namespace

Result<void> refuse_multicast(const AgentSet& agents) {
  for (const AgentClient& agent : agents)
    STASIS_TRY(refuse_multicast_of(agent));
  return {};
}

Result<bool> is_lost_by_driver(AgentClient& agent) {
  if (agent.share_count() == 0) return false;
  STASIS_TRY_ASSIGN(const auto shares, agent.shares(kAtOnce));
  // It names what other processes may know: what it counts besides is the host's, or being made.
  const auto pieces = std::count_if(shares.begin(), shares.end(),
                                    [](const Share& share) { return share.is_piece(); });
  const bool lost = agent.share_count() > static_cast<std::uint64_t>(pieces) ||
                    std::any_of(shares.begin(), shares.end(), [](const Share& share) {
                      return share.of_host || share.is_import() || share.open != 0 ||
                             share.role == ShareRole::kOutside;
                    });
  return lost ? lost : is_held_uncounted(agent.pid(), shares);
}

Result<void> refuse_loss_by_driver(const Process& process) {
  const Pid pid = process.pid();
  if (!direct::says_it_shares(pid)) return {};
  const auto seen = direct::probe_agent(pid);
  // `stasis suspend` has taken it out.
  if (seen && *seen && ((*seen)->detached || direct::is_away((*seen)->state))) return {};
  auto agent = AgentClient::find(pid, process.pidfd());
  Result<bool> lost = agent ? true : Result<bool>(fail(std::move(agent.error())));
  if (lost && *agent) STASIS_TRY(refuse_multicast_of(**agent));
  if (lost && *agent)
    lost = (*agent)->driver_share_count() != 0 ? Result<bool>(true) : is_lost_by_driver(**agent);
  if (lost && !*lost) return {};
  return fail(refusal(
      {"shared-memory", Severity::kRed, pid,
       fmt::format("GPU memory that is shared with other processes (NCCL, CUDA IPC), or memory of "
                   "the host's from cuMemCreate, which the driver cannot restore: process {} would "
                   "be lost{}",
                   pid.value, lost ? "" : " (" + lost.error().message + ")"),
       "suspend or dump it with `stasis`, whose agents give it up and take it again"}));
}

namespace {

Result<bool> has_begun_to_share(AgentClient& agent, MemoryPath path) {
  STASIS_TRY(agent.ask(AgentCommand::kNone, 0, kAtOnce));
  if (agent.driver_share_count() != 0 || agent.multicast_count() != 0) return true;
  if (path == MemoryPath::kDriver) return is_lost_by_driver(agent);
  return agent.share_count() != 0;
}

}  // namespace

Result<void> refuse_late_sharing(const Environment& env, const ProcessTree& tree,
                                 const AgentSet& agents, MemoryPath path) {
  for (const TreeMember& member : tree.members()) {
    const Process& process = member.process;
    if (member.initial != CudaState::kRunning || !process.alive() || agents.has(process.pid()))
      continue;
    const auto seen = direct::probe_agent(process.pid());
    if (!seen || !*seen || !(*seen)->of_our_version || direct::is_away((*seen)->state)) continue;
    // As a killed tool has left it: its agent is parked, too.
    if (process.is_kept_still()) continue;
    auto agent = find_agent(env, process, false);
    Result<bool> shares = false;
    if (!agent)
      shares = fail(std::move(agent.error()));
    else if (*agent)
      shares = has_begun_to_share(**agent, path);
    if (!shares && !process.alive()) continue;
    if (!shares && direct::says_it_shares(process.pid())) return fail(std::move(shares.error()));
    if (!shares || !*shares) continue;
    Error late{ErrorCode::kBusy,
               fmt::format("process {} has begun to share GPU memory with others just now",
                           process.pid().value),
               "try again"};
    late.retry = Retry::kSame;
    return fail(std::move(late));
  }
  return {};
}

}  // namespace stasis
