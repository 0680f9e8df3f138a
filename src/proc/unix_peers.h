// Which unix sockets are connected to which, and how many may wait. /proc does not tell.
#pragma once

#include <cstdint>
#include <map>

#include "base/result.h"

namespace stasis::proc {

struct UnixPeer {
  std::uint64_t inode = 0;  // of the socket at the other end
  bool datagram = false;
};

// By the inode number of each connected unix socket of this process's network namespace
// (sock_diag(7)). A connection that the listener has not accepted yet has no other end. kIo,
// kNotPermitted.
Result<std::map<std::uint64_t, UnixPeer>> unix_peers();

// By the inode number of each unix socket of this process's network namespace that listens: how
// many connections may wait (listen(2)). kIo, kNotPermitted.
Result<std::map<std::uint64_t, std::uint32_t>> unix_backlogs();

// By the inode number of each unix socket of this process's network namespace that is bound to a
// name: that of the file which the name leads to. kIo, kNotPermitted.
Result<std::map<std::uint64_t, std::uint64_t>> unix_names();

}  // namespace stasis::proc
