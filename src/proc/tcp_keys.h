// Whether a TCP socket signs what it sends by a key: of MD5 (RFC 2385, BGP's), or of AO (RFC 5925).
//
// One thread at a time.
#pragma once

#include <sys/types.h>

#include <map>

#include "base/fd.h"
#include "base/ids.h"
#include "proc/socket_options.h"

namespace stasis::proc {

class TcpKeys {
 public:
  // `socket`: a copy of one of the process's, of that network namespace. False where the kernel
  // does not tell: of a key of MD5 without CAP_NET_ADMIN in the namespace, and of a socket that
  // neither listens nor has a connection.
  bool has_key(Pid pid, ino_t network, const UniqueFd& socket, const SocketKind& kind);

 private:
  bool has_md5(const UniqueFd& netlink, const UniqueFd& socket, const SocketKind& kind);

  std::map<ino_t, UniqueFd> netlinks_;  // by network namespace; invalid: it may not be asked
};

}  // namespace stasis::proc
