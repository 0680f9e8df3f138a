// What a socket has and neither CRIU 4.2.1 nor Stasis can read of it, so that a restore loses it:
// as far as something else shows that it may be there.
//
// Private to src/doctor. One thread at a time.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "doctor/criu_checks.h"
#include "proc/multicast.h"
#include "proc/socket_options.h"
#include "proc/tcp_keys.h"

namespace stasis::doctor {

class UnseenOptions {
 public:
  UnseenOptions(const Processes& processes, bool tcp_close, Signs& out)
      : processes_(processes), tcp_close_(tcp_close), out_(out) {}

  // `socket`: a copy. `network`: its namespace; 0: not known.
  void note(Pid pid, int descriptor, ino_t network, const UniqueFd& socket,
            const proc::SocketKind& kind);
  // What the sockets have together, and what their networks tell.
  void finish();

 private:
  // By network namespace, kind, and address.
  using Key = std::pair<std::pair<ino_t, proc::SocketKind>, std::string>;
  struct Sharing {
    Pid pid;
    unsigned port = 0;
    std::vector<int> descriptors;
  };
  void note_sharing(Pid pid, int descriptor, ino_t network, const UniqueFd& socket,
                    const proc::SocketKind& kind);
  bool may_send_to_groups(Pid pid, ino_t network, const UniqueFd& socket,
                          const proc::SocketKind& kind);

  const Processes& processes_;
  bool tcp_close_;
  Signs& out_;
  proc::TcpKeys keys_;
  std::map<Key, Sharing> sharing_;
  std::map<ino_t, std::vector<proc::MulticastGroup>> groups_;
  std::map<ino_t, Pid> with_six_;  // the first process that has a socket of IPv6
};

// In texts of /proc/net/anycast6 and if_inet6: an anycast address that a socket has joined; empty
// if there are only those of the kernel's own, which it has as a router.
std::string joined_anycast(const std::string& anycast, const std::string& addresses);
// In a text of /proc/net/ip6_flowlabel: a label that a socket has, but those of one process that is
// not of `processes`.
std::string leased_label(const std::string& labels, const Processes& processes);

}  // namespace stasis::doctor
