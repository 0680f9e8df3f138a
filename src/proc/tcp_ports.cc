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

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

Request request(std::uint8_t family, std::uint16_t type, int flags) {
  Request out{};
  out.header.nlmsg_len = sizeof out;
  out.header.nlmsg_type = type;
  out.header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
  out.body.sdiag_family = family;
  out.body.sdiag_protocol = IPPROTO_TCP;
  out.body.idiag_states = 1U << TCP_TIME_WAIT;
  return out;
}

bool ask(const UniqueFd& netlink, const Request& what) {
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  return ::sendto(netlink.get(), &what, sizeof what, 0, reinterpret_cast<const sockaddr*>(&kernel),
                  sizeof kernel) == sizeof what;
}

// The connections of a family in TIME_WAIT.
std::vector<inet_diag_sockid> time_waits(const UniqueFd& netlink, std::uint8_t family) {
  std::vector<inet_diag_sockid> out;
  if (!ask(netlink, request(family, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP))) return out;
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
      out.push_back(info.id);
    }
  }
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

int count_time_waits(const std::set<std::uint16_t>& ports, bool end) {
  const UniqueFd netlink(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!netlink.valid()) return 0;
  const timeval timeout{1, 0};  // the kernel answers at once, or not at all
  ::setsockopt(netlink.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  int count = 0;
  for (const std::uint8_t family : {std::uint8_t{AF_INET}, std::uint8_t{AF_INET6}}) {
    for (const inet_diag_sockid& id : time_waits(netlink, family)) {
      if (!ports.contains(ntohs(id.idiag_sport))) continue;
      Request kill = request(family, SOCK_DESTROY, NLM_F_ACK);
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

}  // namespace stasis::proc
