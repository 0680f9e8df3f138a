#include "proc/tcp_ports.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/netlink.h"

namespace stasis::proc {
namespace {

constexpr std::uint8_t kFamilies[] = {AF_INET, AF_INET6};

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

Request request(std::uint8_t family, std::uint16_t type, int flags, int state) {
  Request out{};
  out.header.nlmsg_len = sizeof out;
  out.header.nlmsg_type = type;
  out.header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
  out.body.sdiag_family = family;
  out.body.sdiag_protocol = IPPROTO_TCP;
  out.body.idiag_states = 1U << state;
  return out;
}

bool ask(const UniqueFd& netlink, const Request& what) {
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  return ::sendto(netlink.get(), &what, sizeof what, 0, reinterpret_cast<const sockaddr*>(&kernel),
                  sizeof kernel) == sizeof what;
}

// The sockets of a family in that state. `no_holder`: those that no program has any more.
std::vector<inet_diag_sockid> sockets_in(const UniqueFd& netlink, std::uint8_t family, int state,
                                         bool no_holder = false) {
  std::vector<inet_diag_sockid> out;
  if (!ask(netlink, request(family, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, state))) return out;
  std::array<char, 32768> buffer;
  for (;;) {
    const ssize_t got = ::recv(netlink.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0) return out;
    const auto size = static_cast<std::size_t>(got);
    nlmsghdr header{};
    for (std::size_t at = 0; at + sizeof header <= size; at += NLMSG_ALIGN(header.nlmsg_len)) {
      std::memcpy(&header, buffer.data() + at, sizeof header);
      if (header.nlmsg_type == NLMSG_DONE || header.nlmsg_type == NLMSG_ERROR) return out;
      if (header.nlmsg_len < sizeof header || header.nlmsg_len > size - at) return out;
      inet_diag_msg info{};
      if (header.nlmsg_len < NLMSG_HDRLEN + sizeof info) continue;
      std::memcpy(&info, buffer.data() + at + NLMSG_HDRLEN, sizeof info);
      if (!no_holder || info.idiag_inode == 0) out.push_back(info.id);
    }
  }
}

// As BoundSocket has it.
in6_addr local_address(std::uint8_t family, const inet_diag_sockid& id) {
  in6_addr out{};
  if (family == AF_INET6) {
    std::memcpy(&out, id.idiag_src, sizeof out);
    return out;
  }
  out.s6_addr[10] = out.s6_addr[11] = 0xff;
  std::memcpy(&out.s6_addr[12], id.idiag_src, sizeof(in_addr));
  return out;
}

}  // namespace

std::vector<std::uint16_t> TcpPorts::of(Pid pid) {
  const auto own = procfs_->tcp_socket_inodes(pid);
  struct stat space = {};
  if (!own || own->empty() ||
      ::stat(fmt::format("/proc/{}/ns/net", pid.value).c_str(), &space) != 0)
    return {};
  const auto [table, is_new] = tables_.try_emplace(space.st_ino);
  if (is_new) table->second = procfs_->tcp_sockets(pid).value_or(std::vector<InetSocket>());
  std::set<std::uint16_t> ports;
  for (const InetSocket& socket : table->second) {
    if (socket.listens && std::find(own->begin(), own->end(), socket.inode) != own->end()) {
      ports.insert(socket.local_port);
    }
  }
  return {ports.begin(), ports.end()};
}

int count_time_waits(const std::vector<BoundSocket>& sockets, bool end) {
  const UniqueFd netlink = open_netlink(NETLINK_SOCK_DIAG);
  if (!netlink.valid()) return 0;
  int count = 0;
  for (const std::uint8_t family : kFamilies) {
    std::vector<inet_diag_sockid> closed = sockets_in(netlink, family, TCP_TIME_WAIT);
    const auto half = sockets_in(netlink, family, TCP_FIN_WAIT2, true);
    closed.insert(closed.end(), half.begin(), half.end());
    for (const inet_diag_sockid& id : closed) {
      const in6_addr local = local_address(family, id);
      const bool is_one = std::any_of(sockets.begin(), sockets.end(), [&](const BoundSocket& one) {
        return one.is_tcp && one.port == ntohs(id.idiag_sport) && one.takes(local);
      });
      if (!is_one) continue;
      Request kill = request(family, SOCK_DESTROY, NLM_F_ACK, TCP_TIME_WAIT);
      kill.body.id = id;
      struct {
        nlmsghdr header;
        nlmsgerr body;
      } answer{};
      const bool ended = end && ask(netlink, kill) &&
                         ::recv(netlink.get(), &answer, sizeof answer, 0) >=
                             static_cast<ssize_t>(NLMSG_LENGTH(sizeof(int))) &&
                         answer.header.nlmsg_type == NLMSG_ERROR && answer.body.error == 0;
      if (!ended) ++count;
    }
  }
  return count;
}

bool is_listened_at(const BoundSocket& socket) {
  const UniqueFd netlink = open_netlink(NETLINK_SOCK_DIAG);
  if (!netlink.valid()) return false;
  for (const std::uint8_t family : kFamilies) {
    for (const inet_diag_sockid& id : sockets_in(netlink, family, TCP_LISTEN)) {
      BoundSocket listener;
      listener.address = local_address(family, id);
      listener.is_four = family == AF_INET;
      if (ntohs(id.idiag_sport) == socket.port &&
          (socket.takes(listener.address) || listener.takes(socket.address)))
        return true;
    }
  }
  return false;
}

}  // namespace stasis::proc
