#include "proc/tcp_connections.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace stasis::proc {

TcpTable::TcpTable(const ProcFs& procfs, Pid pid)
    : TcpTable(procfs.tcp_sockets(pid).value_or(std::vector<InetSocket>())) {}

TcpTable::TcpTable(std::vector<InetSocket> sockets) : sockets_(std::move(sockets)) {
  for (std::size_t i = 0; i < sockets_.size(); ++i) {
    const InetSocket& socket = sockets_[i];
    if (!socket.listens) connections_.emplace(std::pair(socket.local, socket.remote), i);
  }
}

bool TcpTable::stays_within(const InetSocket& socket, const std::set<std::uint64_t>& inodes) const {
  const auto found = connections_.find({socket.remote, socket.local});
  if (found == connections_.end()) return false;
  const InetSocket& peer = sockets_[found->second];
  if (peer.inode != 0) return inodes.contains(peer.inode);
  // Of no process: closed by one, or not accepted by one yet.
  return !peer.is_established ||
         std::any_of(sockets_.begin(), sockets_.end(), [&](const InetSocket& listener) {
           return listener.listens && listener.local_port == peer.local_port &&
                  inodes.contains(listener.inode);
         });
}

namespace {

TcpReach look(const ProcFs& procfs, std::span<const ProcessInfo> processes) {
  std::set<std::uint64_t> inodes;
  std::map<ino_t, TcpTable> tables;  // by network namespace
  for (const ProcessInfo& process : processes) {
    const auto own = procfs.tcp_socket_inodes(process.pid);
    if (!own) {
      if (own.error().code == ErrorCode::kNoSuchProcess || process.state == 'Z') continue;
      return TcpReach::kOutside;
    }
    if (own->empty()) continue;
    inodes.insert(own->begin(), own->end());
    struct stat space {};
    if (::stat(fmt::format("/proc/{}/ns/net", process.pid.value).c_str(), &space) == 0 &&
        !tables.contains(space.st_ino)) {
      tables.emplace(space.st_ino, TcpTable(procfs, process.pid));
    }
  }
  auto reach = TcpReach::kNone;
  for (const auto& [space, table] : tables) {
    for (const InetSocket& socket : table.sockets()) {
      if (socket.listens || !inodes.contains(socket.inode)) continue;
      if (!table.stays_within(socket, inodes)) return TcpReach::kOutside;
      reach = TcpReach::kWithin;
    }
  }
  return reach;
}

}  // namespace

TcpReach tcp_reach(const ProcFs& procfs, std::span<const ProcessInfo> processes) {
  constexpr int kLooks = 5;
  constexpr std::chrono::milliseconds kPause{10};
  for (int looks = 1;; ++looks) {
    const auto reach = look(procfs, processes);
    if (reach != TcpReach::kOutside || looks == kLooks) return reach;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace stasis::proc
