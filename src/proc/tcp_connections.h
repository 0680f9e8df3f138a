// Whether the TCP connections of a tree of processes lead out of it.
//
// Ranks of one job are connected to each other (NCCL, Gloo, torchrun's store). Such connections
// come back with the tree whatever happens meanwhile: both ends stand still at the same time, and
// no other program waits for an answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "proc/procfs.h"

namespace stasis::proc {

// The TCP sockets of one network namespace, as they were when it was made.
class TcpTable {
 public:
  // Empty if the namespace cannot be read.
  TcpTable(const ProcFs& procfs, Pid pid);
  explicit TcpTable(std::vector<InetSocket> sockets);

  const std::vector<InetSocket>& sockets() const { return sockets_; }

  // Is the other end one of the sockets `inodes`, or waits for one of them to accept it, or is it
  // closed? A peer in another network namespace, or on another machine, is outside.
  bool stays_within(const InetSocket& socket, const std::set<std::uint64_t>& inodes) const;

 private:
  std::vector<InetSocket> sockets_;
  // By both addresses, the socket's own one first: its place in `sockets_`.
  std::map<std::pair<std::string, std::string>, std::size_t> connections_;
};

enum class TcpReach { kNone, kWithin, kOutside };

// kWithin: there are connections, and none leads out. kOutside also where a process cannot be read.
// Of processes that run, descriptors and connections are read one after the other, and one end of a
// connection that is just being made seems to be of none of them: so a way out has to be there in
// five looks, 10 ms apart.
TcpReach tcp_reach(const ProcFs& procfs, std::span<const ProcessInfo> processes);

}  // namespace stasis::proc
