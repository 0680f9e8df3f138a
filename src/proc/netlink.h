// Questions to the kernel by netlink(7). Stateless; thread-safe.
#pragma once

#include "base/fd.h"

namespace stasis::proc {

// For questions of that protocol (NETLINK_SOCK_DIAG, NETLINK_ROUTE) in the thread's network
// namespace. Waits a second for an answer, as the kernel gives it at once or not at all. Not valid
// where there is none, with errno.
UniqueFd open_netlink(int protocol);

}  // namespace stasis::proc
