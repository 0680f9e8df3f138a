// Which unix sockets are connected to which. /proc does not tell.
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

}  // namespace stasis::proc
