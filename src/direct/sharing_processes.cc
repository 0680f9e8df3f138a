#include "direct/sharing_processes.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "abi/agent_protocol.h"
#include "direct/agent_probe.h"
#include "proc/unix_peers.h"

namespace stasis {
namespace {

// As /proc writes abstract names.
std::string name_of(std::uint64_t service) {
  return fmt::format("@{}{:016x}", direct::kShareSocket, service);
}

constexpr std::size_t kNameLength = sizeof direct::kShareSocket + 16;

// Of the socket by which an owner is asked, or, with `held`, of a connection to one. None if it is
// not such a name.
std::optional<std::uint64_t> service_in(std::string_view name, bool held) {
  if (held ? name.size() <= kNameLength || name[kNameLength] != '-' : name.size() != kNameLength)
    return std::nullopt;
  name = name.substr(0, kNameLength);
  std::uint64_t service = 0;
  (void)std::from_chars(name.data() + sizeof direct::kShareSocket, name.data() + name.size(),
                        service, 16);
  return name == name_of(service) ? std::optional(service) : std::nullopt;
}

// In its network namespace; none if it has ended.
Result<std::vector<proc::UnixSocket>> sockets_beside(Pid pid) {
  auto sockets = proc::ProcFs().unix_sockets(pid, direct::kShareSocket);
  if (!sockets && sockets.error().code == ErrorCode::kNoSuchProcess)
    return std::vector<proc::UnixSocket>();
  return sockets;
}

std::vector<SharingProcess> processes_with(const std::set<std::uint64_t>& sockets) {
  std::vector<SharingProcess> out;
  if (sockets.empty()) return out;
  const proc::ProcFs procfs;
  const auto all = procfs.all();
  if (!all) return out;
  for (const proc::ProcessInfo& info : *all) {
    const auto inodes = procfs.socket_inodes(info.pid);
    if (inodes && std::any_of(inodes->begin(), inodes->end(),
                              [&](std::uint64_t one) { return sockets.contains(one); }))
      out.push_back({info.pid, info.comm});
  }
  return out;
}

}  // namespace

OwnersAsked find_owners(Pid importer, const std::set<std::uint64_t>& services) {
  OwnersAsked out;
  std::map<std::uint64_t, std::uint64_t> listening;  // by the socket
  const proc::ProcFs procfs;
  const auto sockets = procfs.unix_sockets(importer, direct::kShareSocket);
  if (!sockets || services.empty()) return out;
  for (const proc::UnixSocket& socket : *sockets) {
    const auto service = socket.listens ? service_in(socket.path, false) : std::nullopt;
    if (service && services.contains(*service)) listening.emplace(socket.inode, *service);
  }
  const auto all = procfs.all();
  if (listening.empty() || !all) return out;
  for (const proc::ProcessInfo& info : *all) {
    const auto inodes = procfs.socket_inodes(info.pid);
    if (!inodes) continue;
    // Of one socket it may have several descriptors.
    for (const std::uint64_t inode : std::set<std::uint64_t>(inodes->begin(), inodes->end()))
      if (const auto socket = listening.find(inode); socket != listening.end())
        out[socket->second].push_back({info.pid, info.comm});
  }
  return out;
}

namespace {

Result<std::set<std::uint64_t>> connections_to(const std::set<std::uint64_t>& services,
                                               Pid importer) {
  STASIS_TRY_ASSIGN(const auto sockets, sockets_beside(importer));
  std::set<std::uint64_t> connections;
  for (const proc::UnixSocket& socket : sockets) {
    const auto service = service_in(socket.path, true);
    if (service && services.contains(*service)) connections.insert(socket.inode);
  }
  return connections;
}

}  // namespace

Result<Holders> find_holders(Pid importer, const std::set<std::uint64_t>& services,
                             const std::set<Pid>& members) {
  STASIS_TRY_ASSIGN(auto connections, connections_to(services, importer));
  for (const Pid pid : members) {
    const auto inodes = proc::ProcFs().socket_inodes(pid);
    if (!inodes) continue;
    for (const std::uint64_t inode : *inodes)
      connections.erase(inode);
  }
  if (connections.empty()) return Holders{};
  // A member that runs may have closed one of its own meanwhile.
  STASIS_TRY_ASSIGN(const auto still, connections_to(services, importer));
  std::erase_if(connections, [&](std::uint64_t one) { return !still.contains(one); });
  return Holders{connections.size(), processes_with(connections)};
}

Result<std::set<std::uint64_t>> services_of(Pid pid) {
  std::set<std::uint64_t> out;
  STASIS_TRY_ASSIGN(const auto sockets, sockets_beside(pid));
  if (sockets.empty()) return out;
  STASIS_TRY_ASSIGN(const auto inodes, proc::ProcFs().socket_inodes(pid));
  const std::set<std::uint64_t> own(inodes.begin(), inodes.end());
  for (const proc::UnixSocket& socket : sockets) {
    if (!socket.listens || !own.contains(socket.inode)) continue;
    if (const auto service = service_in(socket.path, false)) out.insert(*service);
  }
  return out;
}

std::vector<SharingProcess> find_silent_owners(const std::set<Pid>& members) {
  std::vector<SharingProcess> out;
  const auto all = proc::ProcFs().all();
  if (!all) return out;
  for (const proc::ProcessInfo& info : *all) {
    if (members.contains(info.pid)) continue;
    const std::uint32_t made = direct::services_of(info.pid);
    if (made == 0) continue;
    const auto asked_by = services_of(info.pid);
    if (!asked_by || asked_by->size() >= made) continue;
    // One that has just ended gave up its memory before its sockets.
    if (direct::services_of(info.pid) != 0) out.push_back({info.pid, info.comm});
  }
  return out;
}

std::vector<SharingProcess> find_users(Pid owner, std::uint64_t service) {
  std::set<std::uint64_t> others;
  const auto sockets = proc::ProcFs().unix_sockets(owner, direct::kShareSocket);
  const auto peers = proc::unix_peers();
  if (!sockets || !peers) return {};
  const std::string name = name_of(service);
  for (const proc::UnixSocket& socket : *sockets) {
    if (socket.listens || socket.path != name) continue;
    if (const auto peer = peers->find(socket.inode); peer != peers->end())
      others.insert(peer->second.inode);
  }
  return processes_with(others);
}

}  // namespace stasis
