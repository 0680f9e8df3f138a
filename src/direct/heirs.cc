#include "direct/heirs.h"

#include <algorithm>
#include <cstdint>
#include <set>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/units.h"
#include "checkpoint/driver_obstacles.h"
#include "direct/sharing_processes.h"
#include "proc/memory_cgroup.h"
#include "proc/procfs.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using direct::Share;
using direct::ShareId;
using direct::ShareRole;

namespace {

// Those who have imported one piece, and what they say of it.
struct Importers {
  std::vector<std::size_t> processes;
  std::vector<std::size_t> holders;  // of these, those that have not given it up
  bool lost_owner = true;            // all of the holders
};

using Services = std::map<std::size_t, std::set<std::uint64_t>>;  // by the process that has some

// Of each owner, by its number, the processes that are asked by that.
OwnersAsked owners_asked(const Services& services, const std::vector<ProcessShares>& processes) {
  OwnersAsked out;
  for (const auto& [process, of_those] : services)
    out.merge(find_owners(processes[process].pid, of_those));
  return out;
}

// Whether the owner has ended, or is one of these, and does not name the piece any more.
bool has_no_owner(const ShareId& id, const Importers& importers, const OwnersAsked& asked,
                  const std::vector<ProcessShares>& processes) {
  const auto owners = asked.find(id[0]);
  if (owners == asked.end()) return importers.lost_owner;
  return std::all_of(
      owners->second.begin(), owners->second.end(), [&](const SharingProcess& owner) {
        return std::any_of(processes.begin(), processes.end(),
                           [&](const ProcessShares& one) { return one.pid == owner.pid; });
      });
}

}  // namespace

Heirs find_heirs(const std::vector<ProcessShares>& processes, const Owners& owners) {
  std::map<ShareId, Importers> orphans;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    for (const Share& share : processes[i].shares) {
      if (share.role != ShareRole::kImporter || owners.contains(share.id)) continue;
      Importers& importers = orphans[share.id];
      importers.processes.push_back(i);
      if (share.is_given_up()) continue;
      importers.holders.push_back(i);
      importers.lost_owner = importers.lost_owner && share.has_lost_owner();
    }
  }
  Services services;
  for (const auto& [id, importers] : orphans)
    if (!importers.holders.empty()) services[importers.holders.front()].insert(id[0]);
  const auto asked = owners_asked(services, processes);
  Heirs heirs;
  for (const auto& [id, importers] : orphans) {
    if (importers.holders.empty()) continue;
    const auto first = importers.holders.front();
    const bool of_one_user =
        std::all_of(importers.processes.begin(), importers.processes.end(),
                    [&](std::size_t one) { return processes[one].uid == processes[first].uid; });
    if (of_one_user && has_no_owner(id, importers, asked, processes)) heirs.emplace(id, first);
  }
  return heirs;
}

namespace {

std::string listed_processes(const std::vector<SharingProcess>& processes) {
  std::string text;
  for (const SharingProcess& one : processes)
    text += fmt::format("{} process {} ({})", text.empty() ? ":" : ",", one.pid.value, one.name);
  return text;
}

// That it has ended is seen by its sockets, which a program may close, too.
Result<void> check_owners_ended(const Heirs& heirs, const std::vector<ProcessShares>& processes,
                                const std::set<Pid>& among_them) {
  Services services;
  for (const auto& [id, heir] : heirs)
    services[heir].insert(id[0]);
  const auto asked = owners_asked(services, processes);
  const auto orphan = std::find_if(heirs.begin(), heirs.end(), [&](const auto& entry) {
    return !asked.contains(entry.first[0]);
  });
  if (orphan == heirs.end()) return {};
  const auto silent = find_silent_owners(among_them);
  if (silent.empty()) return {};
  return fail(refusal(
      {"imported-memory", Severity::kRed, processes[orphan->second].pid,
       fmt::format("GPU memory whose owner cannot be reached; a process outside of the tree that "
                   "has closed the sockets of its agent may still use it{}",
                   listed_processes(silent)),
       "name the common ancestor of both processes, or try again when the other has ended",
       Override::kIgnoreObstacles}));
}

// Whose memory the process has made or inherited, and whose holders no agent counts.
Result<std::set<std::uint64_t>> uncounted(Pid pid, const std::vector<Share>& shares) {
  std::set<std::uint64_t> owned;
  for (const Share& share : shares)
    if (share.role == ShareRole::kOwner) owned.insert(share.id[0]);
  if (owned.empty()) return owned;
  STASIS_TRY_ASSIGN(const auto counted, services_of(pid));
  for (const std::uint64_t service : counted)
    owned.erase(service);
  return owned;
}

}  // namespace

Result<void> check_sole_heirs(const Heirs& heirs, const std::vector<ProcessShares>& processes) {
  std::set<Pid> among_them;
  for (const ProcessShares& process : processes)
    among_them.insert(process.pid);
  STASIS_TRY(check_owners_ended(heirs, processes, among_them));
  Services services;
  for (const auto& [id, heir] : heirs)
    services[heir].insert(id[0]);
  for (std::size_t i = 0; i < processes.size(); ++i) {
    STASIS_TRY_ASSIGN(const auto of_this, uncounted(processes[i].pid, processes[i].shares));
    if (!of_this.empty()) services[i].insert(of_this.begin(), of_this.end());
  }
  for (const auto& [process, of_those] : services) {
    const Pid pid = processes[process].pid;
    STASIS_TRY_ASSIGN(const auto holders, find_holders(pid, of_those, among_them));
    if (holders.outside == 0) continue;
    const std::string named = listed_processes(holders.named);
    return fail(refusal(
        {"exported-memory", Severity::kRed, pid,
         fmt::format("GPU memory whose owner has ended, has freed it or cannot be reached; a "
                     "process outside of the tree uses it, too{}",
                     named.empty() ? " (which one is not seen from here)" : named),
         "name the common ancestor of both processes, or try again when the other has given it up",
         Override::kIgnoreObstacles}));
  }
  return {};
}

Result<bool> is_held_uncounted(Pid pid, const std::vector<Share>& shares) {
  STASIS_TRY_ASSIGN(const auto services, uncounted(pid, shares));
  STASIS_TRY_ASSIGN(const auto holders, find_holders(pid, services, {pid}));
  return holders.outside != 0;
}

Result<void> let_inherit(AgentSet& agents, const std::vector<ProcessShares>& processes,
                         const Heirs& heirs) {
  std::map<Pid, std::uint64_t> bytes;
  // One that has imported a piece several times saves it once.
  for (const auto& [id, heir] : heirs) {
    const auto& shares = processes[heir].shares;
    const auto piece = std::find_if(shares.begin(), shares.end(),
                                    [id = id](const Share& share) { return share.id == id; });
    bytes[processes[heir].pid] += piece->bytes;
  }
  for (const auto& [pid, needed] : bytes) {
    if (needed <= room_on_host(pid)) continue;
    return fail(
        refusal({"host-memory", Severity::kRed, pid,
                 fmt::format("process {} is to save {} of GPU memory whose owner has ended or has "
                             "freed it, and there is no room for that in host memory",
                             pid.value, format_bytes(needed)),
                 "free host memory, or raise the limit of the process's memory cgroup"},
                ErrorCode::kOutOfHostMemory));
  }
  const auto agent_of = [&](std::size_t process) {
    const Pid pid = processes[process].pid;
    return std::find_if(agents.begin(), agents.end(),
                        [&](const AgentClient& one) { return one.pid() == pid; });
  };
  for (std::size_t i = 0; i < processes.size(); ++i) {
    const bool has_some = std::any_of(processes[i].shares.begin(), processes[i].shares.end(),
                                      [&](const Share& share) { return heirs.contains(share.id); });
    if (has_some) STASIS_TRY(agent_of(i)->ask(AgentCommand::kStay, 0, kAtOnce));
  }
  for (const auto& [id, heir] : heirs) {
    const auto agent = agent_of(heir);
    agent->begin(AgentCommand::kInherit, id);
    STASIS_TRY(agent->finish(kMapping));
    STASIS_TRY(fault(FaultPoint::kDirectInherited));
  }
  return {};
}

std::uint64_t room_on_host(Pid pid) {
  constexpr std::uint64_t kReserve = std::uint64_t{512} << 20;
  constexpr std::uint64_t kGroupReserve = std::uint64_t{32} << 20;
  const proc::ProcFs procfs;
  std::uint64_t room = procfs.memory_available().value_or(UINT64_MAX);
  room -= std::min(room, kReserve);
  for (const proc::MemoryCgroup& group : proc::memory_cgroups(pid)) {
    const std::uint64_t in_group = group.room(procfs.swap_free().value_or(0));
    room = std::min(room, in_group - std::min(in_group, kGroupReserve));
  }
  return std::max<std::uint64_t>(room, 1);  // 0 is no limit
}

}  // namespace stasis
