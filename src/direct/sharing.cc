#include "direct/sharing.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "abi/agent_protocol.h"
#include "base/fault_point.h"
#include "base/fd.h"
#include "base/threads.h"
#include "base/units.h"
#include "checkpoint/driver_obstacles.h"
#include "direct/sharing_processes.h"
#include "direct/sharing_refusals.h"
#include "proc/procfs.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;
using direct::Share;
using direct::ShareId;
using direct::ShareRole;

namespace {

std::string of_those(const OwnersAsked& owners) {
  std::map<Pid, std::string> names;
  for (const auto& [service, processes] : owners)
    for (const SharingProcess& owner : processes)
      names.emplace(owner.pid, owner.name);
  std::string text;
  for (const auto& [pid, name] : names)
    text += fmt::format("{} process {} ({})", text.empty() ? " of" : ",", pid.value, name);
  return text;
}

Result<Owners> owners_of(const std::vector<ProcessShares>& processes) {
  Owners owners;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    for (const Share& share : processes[i].shares) {
      if (share.role != ShareRole::kOwner) continue;
      const auto [at, is_new] = owners.try_emplace(share.id, i);
      if (is_new || at->second == i) continue;
      return fail(ErrorCode::kInternal,
                  fmt::format("the agents in processes {} and {} say that they have made the same "
                              "GPU memory",
                              processes[at->second].pid.value, processes[i].pid.value),
                  "do not trust these processes: a page is forged or damaged");
    }
  }
  return owners;
}

// As the owner's agent answers no other user either: an id is no secret, and the importer's may be
// forged.
bool may_lend(const ProcessShares& owner, const ProcessShares& importer) {
  return owner.uid == importer.uid;
}

Orphans orphans_of(const ProcessShares& process, const std::vector<ProcessShares>& processes,
                   const Owners& owners, const Heirs& heirs = {}) {
  Orphans orphans;
  for (const Share& share : process.shares) {
    if (!share.is_import()) continue;
    const auto owner = owners.find(share.id);
    const bool lent = owner != owners.end() && may_lend(processes[owner->second], process);
    if (share.role == ShareRole::kImporter && (lent || heirs.contains(share.id))) continue;
    ++orphans.count;
    orphans.bytes += share.bytes;
    if (owner != owners.end()) orphans.of_other_user = &processes[owner->second];
    if (share.role == ShareRole::kImporter)
      orphans.services.insert(share.id[0]);
    else
      ++orphans.foreign;
  }
  return orphans;
}

// A device goes on where the memory was.
Result<void> check_outside(const std::vector<ProcessShares>& processes) {
  for (const ProcessShares& process : processes) {
    const auto count = static_cast<std::size_t>(
        std::count_if(process.shares.begin(), process.shares.end(),
                      [](const Share& share) { return share.role == ShareRole::kOutside; }));
    if (count == 0) continue;
    return fail(refusal(
        {"exported-memory", Severity::kRed, process.pid,
         fmt::format(
             "GPU memory that a device or another host may use (a dma-buf, as for a network "
             "card or GDRCopy, or a fabric handle), and that no tool can tell when the "
             "memory moves: process {} has given out {}",
             process.pid.value, count == 1 ? "1 piece" : fmt::format("{} pieces", count)),
         "try again when that memory is freed, or start it without: NCCL_NET_GDR_LEVEL=LOC, "
         "UCX_IB_GPU_DIRECT_RDMA=n; fabric handles: NCCL_MNNVL_ENABLE=0",
         Override::kIgnoreObstacles}));
  }
  return {};
}

// Of these importers.
Result<void> check_imports(const std::vector<ProcessShares>& importers,
                           const std::vector<ProcessShares>& processes, const Owners& owners,
                           const Heirs& heirs) {
  for (const ProcessShares& process : importers) {
    const auto orphans = orphans_of(process, processes, owners, heirs);
    if (orphans.count == 0) continue;
    if (orphans.count == orphans.foreign) return refuse_foreign(process.pid, orphans);
    if (orphans.of_other_user) return refuse_of_other_user(process, *orphans.of_other_user);
    const std::string whose = of_those(find_owners(process.pid, orphans.services));
    if (whose.empty()) return refuse_lost_owner(process.pid, orphans);
    return refuse_import(
        process.pid,
        fmt::format("GPU memory of a process outside of the tree: process {} has imported {}{}; "
                    "the driver cannot restore it (the job would be lost)",
                    process.pid.value, pieces(orphans.count, orphans.bytes), whose),
        "name the common ancestor of both processes, and start all of them with `stasis run`");
  }
  return {};
}

// Whether some owner may still have it: one that is not among these, as those name what they have.
bool may_be_had_elsewhere(Pid importer, const Orphans& orphans,
                          const std::vector<ProcessShares>& processes) {
  const auto asked = find_owners(importer, orphans.services);
  return std::any_of(asked.begin(), asked.end(), [&](const auto& entry) {
    return std::any_of(entry.second.begin(), entry.second.end(), [&](const SharingProcess& owner) {
      return std::none_of(processes.begin(), processes.end(),
                          [&](const ProcessShares& one) { return one.pid == owner.pid; });
    });
  });
}

// What has been given up and cannot be had again, as its owner lives no more or has freed it, and
// so has its heir.
Result<void> check_owners_live(const std::vector<ProcessShares>& importers,
                               const std::vector<ProcessShares>& processes, const Owners& owners) {
  for (const ProcessShares& process : importers) {
    const auto orphans = orphans_of(process, processes, owners);
    if (orphans.count == 0 || orphans.of_other_user ||
        may_be_had_elsewhere(process.pid, orphans, processes))
      continue;
    return fail(ErrorCode::kNotRolledBack,
                fmt::format("process {} has given up {} of GPU memory whose owner has ended or has "
                            "freed it meanwhile; no tool can bring that back",
                            process.pid.value, pieces(orphans.count, orphans.bytes)),
                fmt::format("end it (`kill -9 {}`), and start the job again, or restore it from an "
                            "image if there is one",
                            process.pid.value));
  }
  return {};
}

// A piece by CUDA IPC says how often it is open, and a process how many others have memory of its
// by descriptor. The process that says more than the others of its user and root's do: an agent
// gives nothing to another user, whose process may have forged that it has it.
struct OpenElsewhere {
  Pid pid;
  std::uint64_t service = 0;
};

std::optional<OpenElsewhere> open_elsewhere(const std::vector<ProcessShares>& processes) {
  constexpr unsigned kRoot = 0;
  std::map<std::pair<unsigned, ShareId>, std::uint32_t> known;
  for (const ProcessShares& process : processes)
    for (const Share& share : process.shares)
      if (share.role == ShareRole::kImporter || share.role == ShareRole::kHolder)
        ++known[{process.uid, share.id}];
  const auto believed = [&](unsigned uid, const ShareId& id) {
    return known[{uid, id}] + (uid == kRoot ? 0 : known[{kRoot, id}]);
  };
  for (const ProcessShares& process : processes) {
    for (const Share& share : process.shares) {
      const bool says = share.role == ShareRole::kOwner || share.role == ShareRole::kLender;
      if (says && share.open > believed(process.uid, share.id))
        return OpenElsewhere{process.pid, share.id[0]};
    }
  }
  return std::nullopt;
}

}  // namespace

Result<void> check_sharing(const std::vector<ProcessShares>& processes) {
  STASIS_TRY_ASSIGN(const auto owners, owners_of(processes));
  STASIS_TRY(check_outside(processes));
  const auto heirs = find_heirs(processes, owners);
  STASIS_TRY(check_imports(processes, processes, owners, heirs));
  STASIS_TRY(check_sole_heirs(heirs, processes));
  const auto owner = open_elsewhere(processes);
  if (!owner) return {};
  std::set<Pid> known;
  for (const ProcessShares& process : processes)
    known.insert(process.pid);
  std::string others;
  for (const SharingProcess& other : find_users(owner->pid, owner->service))
    if (!known.contains(other.pid))
      others += fmt::format(", and process {} ({}) has it", other.pid.value, other.name);
  return fail(refusal(
      {"exported-memory", Severity::kRed, owner->pid,
       fmt::format("GPU memory that a process outside of the tree has open (CUDA IPC, or "
                   "imported by descriptor): process {} has made it{}",
                   owner->pid.value, others),
       "name the common ancestor of both processes, or try again when the other has closed it "
       "(cudaIpcCloseMemHandle; PyTorch: when its last tensor of it is gone)",
       Override::kIgnoreObstacles}));
}

bool may_settle(const std::vector<ProcessShares>& processes) {
  if (open_elsewhere(processes)) return true;
  const auto owners = owners_of(processes);
  if (!owners) return false;
  const auto heirs = find_heirs(processes, *owners);
  return std::any_of(processes.begin(), processes.end(), [&](const ProcessShares& process) {
    return orphans_of(process, processes, *owners, heirs).count != 0;
  });
}

namespace {

// Whether all of the process's managed memory is such as its agent can give up. Asked more than
// once, as the program goes on allocating, and the driver maps it before the agent knows.
bool gives_managed_up(Pid pid) {
  constexpr int kTimes = 10;
  constexpr std::chrono::milliseconds kPause{2};
  for (int i = 0; i < kTimes; ++i) {
    if (i > 0) std::this_thread::sleep_for(kPause);
    const auto mappings = proc::ProcFs().mappings(pid);
    const auto agent = direct::probe_agent(pid);
    if (!mappings || !agent || !*agent || !(*agent)->of_our_version) return false;
    if (managed_bytes(*mappings) <= (*agent)->managed_areas * direct::kManagedArea) return true;
  }
  return false;
}

bool has_our_agent(Pid pid) {
  const auto agent = direct::probe_agent(pid);
  return agent && *agent && (*agent)->of_our_version;
}

bool is_lifted(const Obstacle& obstacle, bool quiesced) {
  if (obstacle.id == "managed-memory") return !quiesced && gives_managed_up(obstacle.pid);
  return obstacle.id == "nccl" && has_our_agent(obstacle.pid);
}

// What to do is not to start it with an agent where it has one.
void say_what_agents_lack(std::vector<Obstacle>& obstacles) {
  for (Obstacle& one : obstacles) {
    if (one.id != "managed-memory" || !has_our_agent(one.pid)) continue;
    one.what =
        "managed memory that its agent did not allocate, such as a __managed__ variable of a "
        "module, which the driver refuses to checkpoint";
    one.remedy =
        "use memory from cudaMallocManaged or cudaMalloc instead, or suspend it while no such "
        "module is loaded";
  }
}

}  // namespace

std::vector<Obstacle> drop_lifted(std::vector<Obstacle>& obstacles, bool quiesced) {
  const auto lifted =
      std::stable_partition(obstacles.begin(), obstacles.end(),
                            [&](const Obstacle& one) { return !is_lifted(one, quiesced); });
  std::vector<Obstacle> out(std::make_move_iterator(lifted),
                            std::make_move_iterator(obstacles.end()));
  obstacles.erase(lifted, obstacles.end());
  say_what_agents_lack(obstacles);
  return out;
}

bool any_imports(const std::vector<ProcessShares>& processes) {
  return std::any_of(processes.begin(), processes.end(), [](const ProcessShares& process) {
    return std::any_of(process.shares.begin(), process.shares.end(),
                       [](const Share& share) { return share.is_import(); });
  });
}

Result<std::vector<ProcessShares>> ask_for_shares(AgentSet& agents) {
  std::vector<ProcessShares> all;
  for (AgentClient& agent : agents) {
    STASIS_TRY_ASSIGN(const auto details, proc::ProcFs().details(agent.pid()));
    all.push_back({agent.pid(), details.uid, {}});
    STASIS_TRY_ASSIGN(all.back().shares, agent.shares(kAtOnce));
  }
  return all;
}

Result<std::vector<ProcessShares>> ask_for_settled_shares(AgentSet& agents,
                                                          const Interrupt& interrupt) {
  const auto start = Clock::now();
  for (;;) {
    auto shares = ask_for_shares(agents);
    if (!shares || !may_settle(*shares) || since(start) >= kHandOver) return shares;
    STASIS_TRY(interrupt.check());
    std::this_thread::sleep_for(kHandOverPause);
  }
}

namespace {

std::vector<AgentClient*> sharers(AgentSet& agents) {
  std::vector<AgentClient*> out;
  for (AgentClient& agent : agents)
    if (agent.share_count() != 0) out.push_back(&agent);
  return out;
}

// These give up what they have of others. What an heir has saved becomes its own.
Result<void> let_give_up(AgentSet& agents, const std::vector<AgentClient*>& asked,
                         const DriverThreads& threads) {
  Stillness still;
  for (AgentClient& agent : agents)
    STASIS_TRY(still.keep(agent, threads));
  for (AgentClient* agent : asked)
    agent->begin(AgentCommand::kDetach, room_on_host(agent->pid()));
  if (!asked.empty()) fault_only(FaultPoint::kDirectReplacing);
  Result<void> done;
  for (AgentClient* agent : asked) {
    auto detached = still.finish(*agent);
    if (!detached) done = std::move(detached);
  }
  auto ended = still.end();
  if (done) done = std::move(ended);
  if (done && !asked.empty()) done = fault(FaultPoint::kDirectDetached);
  return done;
}

}  // namespace

Result<void> detach_all(AgentSet& agents, const DriverThreads& threads) {
  STASIS_TRY_ASSIGN(const auto shares, ask_for_shares(agents));
  STASIS_TRY_ASSIGN(const auto owners, owners_of(shares));
  STASIS_TRY(let_inherit(agents, shares, find_heirs(shares, owners)));
  return let_give_up(agents, sharers(agents), threads);
}

namespace {

bool misses_some(const AgentClient& agent) {
  return agent.detached_count() != 0 && agent.pidfd().alive();
}

// An heir, or one that has what is to be inherited, has given that up, and others still have it:
// they give it up as well, and all take it from the heir again.
Result<void> finish_inheritance(AgentSet& agents, const DriverThreads& threads) {
  STASIS_TRY_ASSIGN(const auto shares, ask_for_shares(agents));
  STASIS_TRY_ASSIGN(auto owners, owners_of(shares));
  bool any_heir = false;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    for (const Share& share : shares[i].shares) {
      if (share.role != ShareRole::kHeir) continue;
      owners.try_emplace(share.id, i);
      any_heir = true;
    }
  }
  const auto heirs = find_heirs(shares, owners);
  if (heirs.empty() && !any_heir) return {};
  STASIS_TRY(let_inherit(agents, shares, heirs));
  // Those whose own memory was taken out had given all this up before.
  auto asked = sharers(agents);
  std::erase_if(asked,
                [](const AgentClient* one) { return one->state() != direct::AgentState::kClosed; });
  return let_give_up(agents, asked, threads);
}

// An importer, and what it misses.
struct Borrower {
  AgentClient* agent = nullptr;
  std::set<ShareId> ids;
};

// The first error of what several did at the same time.
Result<void> first_of(std::vector<Result<void>>& done) {
  for (auto& one : done)
    STASIS_TRY(std::move(one));
  return {};
}

// All owners export at the same time, and then all importers take. `owners` by their place in
// `agents`.
Result<void> lend(const std::vector<Borrower>& borrowers, const std::vector<AgentClient*>& agents,
                  const Owners& owners) {
  // One descriptor for all that import the piece.
  std::map<ShareId, UniqueFd> lent;
  std::map<std::size_t, std::vector<std::pair<ShareId, UniqueFd*>>> by_owner;
  for (const Borrower& borrower : borrowers) {
    for (const ShareId& id : borrower.ids) {
      const auto [piece, is_new] = lent.try_emplace(id);
      if (is_new) by_owner[owners.at(id)].emplace_back(id, &piece->second);
    }
  }
  constexpr std::size_t kSpare = 64;
  STASIS_TRY(allow_descriptors(lent.size() + kSpare));
  const std::vector asked(by_owner.begin(), by_owner.end());
  std::vector<Result<void>> done(asked.size());
  share_out(asked.size(), [&](std::size_t i) {
    for (const auto& [id, piece] : asked[i].second) {
      auto borrowed = agents[asked[i].first]->borrow(id, kMapping);
      if (!borrowed) {
        done[i] = fail(std::move(borrowed.error()));
        return;
      }
      *piece = std::move(*borrowed);
    }
  });
  STASIS_TRY(first_of(done));
  done = std::vector<Result<void>>(borrowers.size());
  share_out(borrowers.size(), [&](std::size_t i) {
    std::vector<AgentClient::Lent> pieces;
    for (const ShareId& id : borrowers[i].ids)
      pieces.emplace_back(id, &lent.at(id));
    done[i] = borrowers[i].agent->attach(pieces, kMapping);
    fault_only(FaultPoint::kDirectAttachedOne);
  });
  return first_of(done);
}

Result<void> attach_living(AgentSet& agents, AgentSet& lenders, const DriverThreads& threads) {
  if (std::none_of(agents.begin(), agents.end(), misses_some)) return {};
  fault_only(FaultPoint::kDirectAttach);
  STASIS_TRY(finish_inheritance(agents, threads));
  std::vector<AgentClient*> missing;
  for (AgentClient& agent : agents)
    if (misses_some(agent)) missing.push_back(&agent);
  Stillness still;
  for (AgentClient* agent : missing)
    STASIS_TRY(still.keep(*agent, threads));
  for (AgentClient* agent : missing)
    agent->begin(AgentCommand::kRetake, 0);
  fault_only(FaultPoint::kDirectReplacing);
  Result<void> retaken;
  for (AgentClient* agent : missing) {
    auto done = still.finish(*agent);
    if (!done) retaken = std::move(done);
  }
  auto ended = still.end();
  if (retaken) retaken = std::move(ended);
  if (!retaken) return retaken;
  std::vector<ProcessShares> known;
  std::vector<AgentClient*> by_process;
  for (AgentSet* set : {&agents, &lenders}) {
    STASIS_TRY_ASSIGN(auto shares, ask_for_shares(*set));
    for (ProcessShares& process : shares) {
      const auto agent = std::find_if(set->begin(), set->end(), [&](const AgentClient& one) {
        return one.pid() == process.pid;
      });
      by_process.push_back(&*agent);
      known.push_back(std::move(process));
    }
  }
  STASIS_TRY_ASSIGN(const auto owners, owners_of(known));
  // What has no owner any more, and was not given up, is still there.
  std::vector<ProcessShares> without;
  for (std::size_t i = 0; i < known.size(); ++i)
    if (by_process[i]->detached_count() != 0) without.push_back(known[i]);
  STASIS_TRY(check_owners_live(without, known, owners));
  STASIS_TRY(check_imports(without, known, owners, {}));
  std::vector<Borrower> borrowers;
  for (std::size_t i = 0; i < agents.size(); ++i) {  // which come before the lenders
    if (by_process[i]->detached_count() == 0) continue;
    borrowers.push_back({by_process[i], {}});
    for (const Share& share : known[i].shares)
      if (share.role == ShareRole::kImporter) borrowers.back().ids.insert(share.id);
  }
  STASIS_TRY(lend(borrowers, by_process, owners));
  // Agents keep what they have lent until their next command.
  for (AgentSet* set : {&agents, &lenders})
    for (AgentClient& agent : *set)
      if (agent.share_count() != 0) STASIS_TRY(agent.ask(AgentCommand::kNone, 0, kAtOnce));
  fault_only(FaultPoint::kDirectAttached);
  return {};
}

}  // namespace

Result<void> attach_all(AgentSet& agents, AgentSet& lenders, const DriverThreads& threads) {
  for (;;) {
    agents.drop_ended();
    lenders.drop_ended();
    const auto before = agents.size() + lenders.size();
    auto done = attach_living(agents, lenders, threads);
    if (done) return done;
    agents.drop_ended();
    lenders.drop_ended();
    if (agents.size() + lenders.size() == before) return done;
  }
}

}  // namespace stasis
