// Which unix sockets are connected to which. /proc does not tell.
#pragma once

#include <cstdint>
#include <map>

#include "stasis/result.h"

namespace stasis::proc {

// The inode number of each connected unix socket of this process's network namespace, with that of
// the socket at its other end (sock_diag(7)). A connection that nobody has accepted yet has none.
// kIo, kNotPermitted.
Result<std::map<std::uint64_t, std::uint64_t>> unix_peers();

}  // namespace stasis::proc
