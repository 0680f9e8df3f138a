#include "proc/netlink.h"

#include <sys/socket.h>
#include <sys/time.h>

namespace stasis::proc {

UniqueFd open_netlink(int protocol) {
  constexpr timeval kTimeout{1, 0};
  UniqueFd out(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol));
  if (out.valid() &&
      ::setsockopt(out.get(), SOL_SOCKET, SO_RCVTIMEO, &kTimeout, sizeof kTimeout) != 0)
    return UniqueFd();
  return out;
}

}  // namespace stasis::proc
