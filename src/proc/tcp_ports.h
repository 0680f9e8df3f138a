// The TCP ports on which processes listen, and the connections that have ended and still hold one.
//
// Asks the kernel. One thread at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <vector>

#include "proc/bound_socket.h"
#include "proc/procfs.h"

namespace stasis::proc {

// Which ports each of many processes listens on. CRIU binds those of connections whichever process
// has them.
class TcpPorts {
 public:
  explicit TcpPorts(const ProcFs& procfs) : procfs_(&procfs) {}

  // In order; empty also where the kernel does not tell.
  std::vector<std::uint16_t> of(Pid pid);

 private:
  const ProcFs* procfs_;
  // Of each network namespace. The kernel takes some 8 ms to write down the TCP sockets of one,
  // however few there are (its table is large), and so is asked once for each, and only if a
  // process has one.
  std::map<ino_t, std::vector<InetSocket>> tables_;
};

// How many connections in state TIME_WAIT, or in FIN_WAIT2 and of no program any more, hold an
// address and a port of one of these in this process's network namespace. With `end`, ends them
// first, where the kernel (CONFIG_INET_DIAG_DESTROY) and our privileges (CAP_NET_ADMIN) allow it. 0
// also where the kernel does not tell.
int count_time_waits(const std::vector<BoundSocket>& sockets, bool end);
// Another socket of TCP listens at an address of this one. False also where the kernel does not
// tell. Of one that is_taken().
bool is_listened_at(const BoundSocket& socket);

}  // namespace stasis::proc
