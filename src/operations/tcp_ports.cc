#include "operations/tcp_ports.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"

namespace stasis {
namespace {

// TCP_TIMEWAIT_LEN of the kernel, and a little.
constexpr std::chrono::seconds kTimeWait{62};
constexpr std::chrono::milliseconds kPoll{200};

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

// Binds a socket there. True also where that cannot be tried.
bool is_here(const std::string& address) {
  sockaddr_in four{};
  sockaddr_in6 six{};
  const bool is_four = ::inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1;
  if (!is_four && ::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) != 1) return true;
  four.sin_family = AF_INET;
  six.sin6_family = AF_INET6;
  const UniqueFd socket(::socket(is_four ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return true;
  const auto* name =
      is_four ? reinterpret_cast<const sockaddr*>(&four) : reinterpret_cast<const sockaddr*>(&six);
  const auto size = static_cast<socklen_t>(is_four ? sizeof four : sizeof six);
  return ::bind(socket.get(), name, size) == 0 || errno != EADDRNOTAVAIL;
}

}  // namespace

Result<void> check_addresses(const Manifest& manifest, bool tcp_close,
                             const std::vector<AddressPair>& mapped) {
  if (!manifest.sockets) return {};
  std::set<std::string> needed(manifest.sockets->addresses.begin(),
                               manifest.sockets->addresses.end());
  if (!tcp_close)
    needed.insert(manifest.sockets->connection_addresses.begin(),
                  manifest.sockets->connection_addresses.end());
  std::vector<std::string> missing;
  for (const std::string& address : needed)
    if (!is_here(mapped_address(address, mapped)))
      missing.push_back(mapped_address(address, mapped));
  if (missing.empty()) return {};
  const bool only_connections =
      std::none_of(missing.begin(), missing.end(), [&](const std::string& address) {
        const auto& bound = manifest.sockets->addresses;
        return std::any_of(bound.begin(), bound.end(), [&](const std::string& one) {
          return mapped_address(one, mapped) == address;
        });
      });
  const bool is_six = missing.front().find(':') != std::string::npos;
  return fail(
      ErrorCode::kCriuFailed,
      fmt::format("{} of the job {} {}, which is not an address of this machine",
                  only_connections ? "TCP connections" : "sockets",
                  only_connections ? "have the address" : "are bound to", fmt::join(missing, ", ")),
      fmt::format("give this machine the address (ip address add {}/{} dev lo), or the job "
                  "another one: --map-address {}=NEW{}",
                  missing.front(), is_six ? 128 : 32, missing.front(),
                  only_connections ? ", or let the connections be closed: --tcp-close"
                                   : "; a program that listens on all addresses does not need it"));
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

Result<void> wait_for_ports(const Environment& env, const Manifest& manifest) {
  std::set<std::uint16_t> ports;
  for (const ProcessRecord& record : manifest.processes)
    ports.insert(record.tcp_ports.begin(), record.tcp_ports.end());
  if (ports.empty() || count_time_waits(ports, true) == 0) return {};
  env.tell(
      "waiting for TCP ports of the job: their last connections were closed less than a minute "
      "ago");
  const auto start = Clock::now();
  while (count_time_waits(ports, true) != 0) {
    STASIS_TRY(env.interrupt.check());
    if (since(start) > kTimeWait) {
      // CRIU may know better, and says so if it does not.
      env.tell(fmt::format("closed connections still hold a port of the job, one of {}",
                           fmt::join(ports, ", ")));
      return {};
    }
    std::this_thread::sleep_for(kPoll);
  }
  return {};
}

}  // namespace stasis
