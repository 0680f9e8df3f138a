#include "operations/dump_connections.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "group/group_part.h"
#include "operations/part_links.h"
#include "proc/tcp_connections.h"

namespace stasis {

void DumpConnections::choose(const std::vector<proc::ProcessInfo>& tree, CriuOptions& criu) {
  if (criu.tcp_established || criu.tcp_close) return;
  const bool is_part = options_.part != nullptr;
  if (!is_part && proc::tcp_reach(proc::ProcFs(), tree) == proc::TcpReach::kOutside) return;
  criu.tcp_established = true;
  criu.network_lock = NetworkLock::kSkip;
  keeps_own_ = !is_part;
}

Result<void> DumpConnections::lock(const CriuOptions& criu, Manifest& manifest, Phases& phases) {
  if (options_.part == nullptr) return {};
  GroupLinks links;
  if (!criu.tcp_close) {
    is_locked_ = true;
    STASIS_TRY_ASSIGN(auto locked, lock_links(root_));
    STASIS_TRY(fault(FaultPoint::kPartLocked));
    links = {std::move(locked.established), std::move(locked.closing),
             options_.criu.tcp_established};
  }
  phases.begin("agree");
  STASIS_TRY(options_.part->agree_on_links(links));
  const GroupPartOptions& own = options_.part->options();
  manifest.group = {
      options_.part->id(),      own.parts,         own.name, std::move(links.established),
      std::move(links.closing), links.may_lead_out};
  return {};
}

// A connection that was made since the lock has an end that is not locked.
Result<void> DumpConnections::refuse_new_links(const Manifest& manifest) const {
  if (!is_locked_) return {};
  STASIS_TRY_ASSIGN(const auto now, find_links(root_));
  const auto& known = manifest.group->links;
  const auto& closing = manifest.group->closing_links;
  const auto made =
      std::find_if(now.established.begin(), now.established.end(), [&](const std::string& link) {
        return !std::binary_search(known.begin(), known.end(), link) &&
               !std::binary_search(closing.begin(), closing.end(), link);
      });
  if (made == now.established.end()) return {};
  return fail(ErrorCode::kBusy,
              fmt::format("a TCP connection that leads out of this part ({}) was opened during "
                          "the dump",
                          *made),
              "try again with all parts");
}

Result<void> DumpConnections::judge(Manifest& manifest) const {
  if (options_.part != nullptr) return refuse_new_links(manifest);
  if (!keeps_own_) return {};
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(const auto tree, procfs.tree(root_));
  const auto reach = proc::tcp_reach(procfs, tree);
  if (reach == proc::TcpReach::kOutside) {
    return fail(ErrorCode::kBusy,
                "a TCP connection that leads out of the job was opened during the dump",
                "dump with --tcp-established to keep it, or --tcp-close to drop it");
  }
  if (reach == proc::TcpReach::kWithin)
    env_.tell("the job's processes are connected with each other by TCP: --tcp-established is set");
  else
    manifest.criu_options.network_lock = options_.criu.network_lock;
  manifest.criu_options.tcp_established = reach == proc::TcpReach::kWithin;
  return {};
}

void DumpConnections::unlock() {
  if (!std::exchange(is_locked_, false)) return;
  std::vector<Pid> processes;
  for (const proc::ProcessInfo& info :
       proc::ProcFs().tree(root_).value_or(std::vector<proc::ProcessInfo>()))
    processes.push_back(info.pid);
  for (const std::string& failed : let_links_go(processes))
    env_.tell(failed);
}

}  // namespace stasis
