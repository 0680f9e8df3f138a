// Options of sockets, all that can be set, and multicast groups.
#include <array>
#include <cstring>

#include "tests/workloads/socket_options.h"
#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kSocketSubject = "sockets";

struct SocketKind {
  const char* socket;  // as in SocketOptions
  const char* name;
};
constexpr std::array kSocketKinds = {
    SocketKind{"udp4", "options of UDP"},
    SocketKind{"udp6", "options of UDP over IPv6"},
    SocketKind{"tcp4", "options of TCP"},
    SocketKind{"tcp6", "options of TCP over IPv6"},
    SocketKind{"tcp-listener", "options of TCP that listens"},
    SocketKind{"raw4", "options of raw IP"},
    SocketKind{"raw6", "options of raw IPv6"},
    SocketKind{"unix-datagram", "options of datagrams between processes (AF_UNIX)"},
    SocketKind{"unix-stream", "options of streams between processes (AF_UNIX)"},
    SocketKind{"netlink", "options of netlink"},
    SocketKind{"netlink-datagram", "options of netlink by SOCK_DGRAM"},
    SocketKind{"packet", "options of packets (AF_PACKET)"},
};

Problem lost_among(const std::vector<std::string>& lines) {
  std::string lost;
  for (const std::string& line : lines)
    if (!line.ends_with("kept")) lost += (lost.empty() ? "" : ", ") + line;
  return lost.empty() ? std::nullopt : Problem(lost);
}

}  // namespace

void add_socket_options(Probe& probe) {
  const auto sockets = std::make_shared<SocketOptions>();
  const std::vector<std::string> names = sockets->names();
  for (const SocketKind& kind : kSocketKinds) {
    std::size_t at = 0;
    while (at < names.size() && names[at] != kind.socket)
      ++at;
    probe.add_check(
        kSocketSubject, kind.name,
        [&] { return at < names.size() ? std::nullopt : Problem("no right to make one"); },
        [=] { return lost_among(sockets->options_of(at)); });
  }
  probe.add_check(
      kSocketSubject, "multicast groups, also of single sources", [] { return Problem(); },
      [=] { return lost_among(sockets->groups()); });
}

}  // namespace stasis::workloads
