#include "proc/tcp_keys.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "proc/in_namespace.h"
#include "proc/netlink.h"

namespace stasis::proc {
namespace {

constexpr int kMd5Keys = 18;         // INET_DIAG_MD5SIG of linux/inet_diag.h, Linux 4.14
constexpr int kAoInfo = 40;          // TCP_AO_INFO of linux/tcp.h, Linux 6.7
constexpr int kBoundInterface = 62;  // SO_BINDTOIFINDEX

// One that asks about the process's network namespace.
UniqueFd diagnosis_socket_of(Pid pid, ino_t network) {
  if (network_of(Pid{::getpid()}) == network) return open_netlink(NETLINK_SOCK_DIAG);
  UniqueFd out;
  in_namespace(
      pid, Namespace::kNetwork, [&] { out = open_netlink(NETLINK_SOCK_DIAG); }, network);
  return out;
}

struct Place {
  std::array<std::uint32_t, 4> address{};
  std::uint16_t port = 0;
};

Place place_of(const sockaddr_storage& name) {
  Place out;
  if (name.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(name);
    out.address[0] = four.sin_addr.s_addr;
    out.port = four.sin_port;
  } else {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(name);
    std::memcpy(out.address.data(), &six.sin6_addr, sizeof six.sin6_addr);
    out.port = six.sin6_port;
  }
  return out;
}

// Of the answer about the socket with that inode number.
bool tells_of_md5(const char* data, std::size_t size, ino_t inode) {
  nlmsghdr header{};
  inet_diag_msg body{};
  if (size < NLMSG_HDRLEN + sizeof body) return false;
  std::memcpy(&header, data, sizeof header);
  std::memcpy(&body, data + NLMSG_HDRLEN, sizeof body);
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY || header.nlmsg_len > size ||
      body.idiag_inode != inode)
    return false;
  rtattr attribute{};
  for (std::size_t at = NLMSG_HDRLEN + NLMSG_ALIGN(sizeof body);
       at + sizeof attribute <= header.nlmsg_len; at += RTA_ALIGN(attribute.rta_len)) {
    std::memcpy(&attribute, data + at, sizeof attribute);
    if (attribute.rta_type == kMd5Keys) return true;
    if (attribute.rta_len < RTA_LENGTH(0)) return false;
  }
  return false;
}

}  // namespace

bool TcpKeys::has_md5(const UniqueFd& netlink, const UniqueFd& socket, const SocketKind& kind) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  struct stat info {};
  socklen_t size = sizeof own;
  if (::fstat(socket.get(), &info) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
    return false;
  size = sizeof peer;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0)
    peer.ss_family = own.ss_family;
  const Place here = place_of(own);
  const Place there = place_of(peer);
  struct {
    nlmsghdr header;
    inet_diag_req_v2 body;
  } request{};
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.body.sdiag_family = static_cast<std::uint8_t>(kind.domain);
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_ext = 1U << (INET_DIAG_INFO - 1);  // the keys come with that
  request.body.idiag_states = ~0U;
  inet_diag_sockid& id = request.body.id;
  id.idiag_sport = here.port;
  id.idiag_dport = there.port;
  std::memcpy(id.idiag_src, here.address.data(), sizeof id.idiag_src);
  std::memcpy(id.idiag_dst, there.address.data(), sizeof id.idiag_dst);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  int interface = 0;
  size = sizeof interface;
  if (::getsockopt(socket.get(), SOL_SOCKET, kBoundInterface, &interface, &size) == 0)
    id.idiag_if = static_cast<std::uint32_t>(interface);
  if (::send(netlink.get(), &request, sizeof request, 0) != sizeof request) return false;
  std::array<char, 32768> answer;
  const ssize_t got = ::recv(netlink.get(), answer.data(), answer.size(), 0);
  return got > 0 && tells_of_md5(answer.data(), static_cast<std::size_t>(got), info.st_ino);
}

bool TcpKeys::has_key(Pid pid, ino_t network, const UniqueFd& socket, const SocketKind& kind) {
  if (!kind.is_inet() || kind.type != SOCK_STREAM || kind.protocol != IPPROTO_TCP) return false;
  std::array<char, 128> info{};
  socklen_t size = info.size();
  if (::getsockopt(socket.get(), IPPROTO_TCP, kAoInfo, info.data(), &size) == 0) return true;
  if (network == 0) return false;
  const auto [netlink, is_new] = netlinks_.try_emplace(network);
  if (is_new) netlink->second = diagnosis_socket_of(pid, network);
  return netlink->second.valid() && has_md5(netlink->second, socket, kind);
}

}  // namespace stasis::proc
