// Sockets in a state that CRIU 4.2.1 does not dump, or loses, of kinds that it dumps.
#include <arpa/inet.h>
#include <linux/netlink.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "doctor/criu_unseen.h"
#include "proc/descriptors.h"
#include "proc/socket_options.h"

namespace stasis::doctor {
namespace {

constexpr Kind kHighGroups{"netlink-socket", Severity::kRed,
                           "has netlink sockets with groups above the 32nd, which CRIU cannot dump",
                           "leave those groups, or close the sockets, before the dump"};
constexpr Kind kNoNumber{"netlink-socket", Severity::kRed,
                         "has netlink sockets that joined groups without being bound, which CRIU "
                         "cannot dump",
                         "bind() them before they join, or close them before the dump"};
constexpr Kind kUnreadNetlink{"unread-netlink", Severity::kRed,
                              "has netlink sockets with messages not yet read, which CRIU cannot "
                              "dump",
                              "dump once more when it has read them, or close the sockets"};
constexpr Kind kUnaccepted{"unaccepted-connection", Severity::kRed,
                           "listens for TCP connections and has not accepted all that were made, "
                           "which CRIU cannot dump",
                           "dump once more when it has accepted them, or end what connects to it"};
constexpr Kind kUnreadUrgent{
    "unread-urgent", Severity::kRed,
    "has TCP data with an urgent byte (MSG_OOB) not yet read, behind which "
    "CRIU reads nothing",
    "dump once more when it has read that, or close the connection"};
constexpr Kind kOfOneLink{
    "link-local-connection", Severity::kRed,
    "has TCP connections by IPv6 addresses of one link (fe80::), which CRIU dumps and cannot "
    "restore",
    "let the program connect by other addresses, close these, or dump with --tcp-close, which cuts "
    "them"};
constexpr Kind kPeeksBehind{
    "peek-offset", Severity::kRed,
    "has TCP data not yet read and an offset to peek at it (SO_PEEK_OFF), by which CRIU reads only "
    "what is behind that, and moves it",
    "dump once more when it has read that, or let the program set the offset to -1"};
constexpr Kind kUnreadError{"unread-error", Severity::kRed,
                            "has unix sockets with an error not yet read, at which CRIU fails, and "
                            "which it takes from them",
                            "dump once more when it has read them, or close the sockets"};
constexpr Kind kPing{
    "ping-socket", Severity::kYellow,
    "has sockets for echo requests (ping, SOCK_DGRAM of ICMP), which lose their "
    "address, their peer and the identifier that answers come back by at a restore",
    "let the program open a new one for each ping, or bind and connect it again"};
constexpr Kind kRaw{"raw-socket", Severity::kYellow,
                    "has raw sockets that are bound or connected, which a restore forgets: they "
                    "then get what comes for all addresses, and send from any",
                    "let the program bind and connect them again, or pass over what is not for it"};

// CRIU fails at most of them, and makes others anew in the tree's own (UDP, netlink).
constexpr Kind kForeign{
    "foreign-socket", Severity::kRed,
    "has sockets of a network namespace that no process of the tree is in, which no restore makes "
    "there again",
    "close them before the dump, or start the program in that namespace (ip netns exec, nsenter)"};
constexpr Kind kExtendedFilter{
    "socket-filter", Severity::kRed,
    "has sockets with a filter of eBPF (SO_ATTACH_BPF), which CRIU cannot dump",
    "let the program take it off (SO_DETACH_FILTER) or use one of classic BPF (SO_ATTACH_FILTER), "
    "or close the sockets, before the dump"};

// The network namespace's number; 0 where we may not ask for it (CAP_NET_ADMIN in it).
ino_t network_of_socket(const UniqueFd& socket) {
  const UniqueFd space(::ioctl(socket.get(), SIOCGSKNS));
  struct stat info {};
  return space.valid() && ::fstat(space.get(), &info) == 0 ? info.st_ino : 0;
}

// sk_get_filter() of the kernel shows none of eBPF.
bool has_extended_filter(const UniqueFd& socket) {
  socklen_t size = 0;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_GET_FILTER, nullptr, &size) != 0 &&
         errno == EACCES;
}

// Of groups, a bit for each; empty if it has never been in one.
std::vector<std::uint32_t> netlink_groups(const UniqueFd& socket) {
  constexpr std::size_t kMost = 2048;  // the kernel has 65536 groups at most
  std::vector<std::uint32_t> groups(kMost);
  auto size = static_cast<socklen_t>(groups.size() * sizeof groups.front());
  if (::getsockopt(socket.get(), SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, groups.data(), &size) != 0)
    return {};
  groups.resize(std::min(kMost, size / sizeof groups.front()));
  return groups;
}

// dump_one_netlink_fd() of CRIU's sk-netlink.c. The kernel gives it the groups in words of 64 bits;
// it leaves out the last 32 if none of them is set, and takes 32 of what is left.
void probe_netlink(Pid pid, int descriptor, const UniqueFd& socket, Signs& out) {
  const std::string shown = fmt::format("descriptor {}", descriptor);
  const auto groups = netlink_groups(socket);
  sockaddr_nl own{};
  socklen_t size = sizeof own;
  const bool is_named =
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) == 0 && own.nl_pid != 0;
  if (groups.size() > 2 || (groups.size() == 2 && groups[1] != 0))
    out.add(pid, kHighGroups, shown);
  else if (!groups.empty() && !is_named)
    out.add(pid, kNoNumber, shown);
  if (proc::has_input(socket)) out.add(pid, kUnreadNetlink, shown);
}

// Of a socket that listens the kernel tells there how many connections wait (tcp_get_info()).
void probe_listener(Pid pid, int descriptor, const UniqueFd& socket, Signs& out) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
      info.tcpi_state == TCP_LISTEN && info.tcpi_unacked > 0)
    out.add(pid, kUnaccepted, fmt::format("{} by descriptor {}", info.tcpi_unacked, descriptor));
}

void probe_urgent(Pid pid, int descriptor, const UniqueFd& socket, Signs& out) {
  pollfd urgent{socket.get(), POLLPRI, 0};
  if (::poll(&urgent, 1, 0) == 1 && (urgent.revents & POLLPRI) != 0)
    out.add(pid, kUnreadUrgent, fmt::format("descriptor {}", descriptor));
}

// Also one whose connection is gone: it has sent something.
void probe_link(Pid pid, int descriptor, const UniqueFd& socket, const proc::SocketKind& kind,
                Signs& out) {
  sockaddr_in6 own{};
  socklen_t size = sizeof own;
  if (kind.domain != AF_INET6 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      !IN6_IS_ADDR_LINKLOCAL(&own.sin6_addr))
    return;
  constexpr std::size_t kSegmentsOut = 136;  // tcpi_segs_out of linux/tcp.h
  std::array<char, kSegmentsOut + sizeof(std::uint32_t)> info{};
  size = info.size();
  if (::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, info.data(), &size) != 0) return;
  std::uint32_t sent = 0;
  std::memcpy(&sent, info.data() + kSegmentsOut, sizeof sent);
  if (proc::is_connection(socket, kind) || (info[0] == TCP_CLOSE && sent > 0))
    out.add(pid, kOfOneLink, fmt::format("descriptor {}", descriptor));
}

void probe_peek_offset(Pid pid, int descriptor, const UniqueFd& socket,
                       const proc::SocketKind& kind, Signs& out) {
  if (proc::is_connection(socket, kind) && proc::peeks_behind(socket))
    out.add(pid, kPeeksBehind, fmt::format("descriptor {}", descriptor));
}

struct OwnName {
  std::string address;  // empty for "any"
  in_port_t number = 0;
};

OwnName own_name(const UniqueFd& socket) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) return {};
  const auto* const four = reinterpret_cast<const sockaddr_in*>(&own);
  const auto* const six = reinterpret_cast<const sockaddr_in6*>(&own);
  const bool is_six = own.ss_family == AF_INET6;
  const bool is_any =
      is_six ? IN6_IS_ADDR_UNSPECIFIED(&six->sin6_addr) != 0 : four->sin_addr.s_addr == INADDR_ANY;
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* const address = is_six ? static_cast<const void*>(&six->sin6_addr) : &four->sin_addr;
  if (!is_any) (void)::inet_ntop(own.ss_family, address, text.data(), text.size());
  return {text.data(), ntohs(is_six ? six->sin6_port : four->sin_port)};
}

// One that is neither bound nor connected, and has sent nothing, has no identifier yet.
void probe_ping(Pid pid, int descriptor, const UniqueFd& socket, Signs& out) {
  if (const OwnName own = own_name(socket); own.number != 0)
    out.add(pid, kPing, fmt::format("identifier {} (descriptor {})", own.number, descriptor));
}

// To be connected gives it an address of its own, too.
void probe_raw(Pid pid, int descriptor, const UniqueFd& socket, Signs& out) {
  if (const OwnName own = own_name(socket); !own.address.empty())
    out.add(pid, kRaw, fmt::format("{} (descriptor {})", own.address, descriptor));
}

void probe_one(Pid pid, int descriptor, const UniqueFd& socket, bool tcp_close, Signs& out) {
  const auto kind = proc::socket_kind(socket);
  if (!kind) return;
  if (has_extended_filter(socket))
    out.add(pid, kExtendedFilter, fmt::format("descriptor {}", descriptor));
  const bool is_inet = kind->domain == AF_INET || kind->domain == AF_INET6;
  if (kind->domain == AF_NETLINK) probe_netlink(pid, descriptor, socket, out);
  if (is_inet && kind->type == SOCK_STREAM) {
    probe_listener(pid, descriptor, socket, out);
    if (!tcp_close) {
      probe_urgent(pid, descriptor, socket, out);
      probe_link(pid, descriptor, socket, *kind, out);
      probe_peek_offset(pid, descriptor, socket, *kind, out);
    }
  }
  if (kind->domain == AF_UNIX && proc::has_error(socket))
    out.add(pid, kUnreadError, fmt::format("descriptor {}", descriptor));
  if (is_inet && kind->type == SOCK_DGRAM &&
      (kind->protocol == IPPROTO_ICMP || kind->protocol == IPPROTO_ICMPV6))
    probe_ping(pid, descriptor, socket, out);
  if (is_inet && kind->type == SOCK_RAW) probe_raw(pid, descriptor, socket, out);
}

}  // namespace

void probe_socket_states(Facts& facts, const Processes& processes, bool tcp_close, Signs& out) {
  std::set<std::string> seen;  // "socket:[1234]"
  std::set<ino_t> networks;
  for (const proc::ProcessInfo& info : processes)
    networks.insert(facts.namespace_of(info.pid, "net"));
  const bool all_are_known = !networks.contains(0);
  proc::DroppedCopies dropped;
  UnseenOptions unseen(processes, tcp_close, out);
  for (const proc::ProcessInfo& info : processes) {
    const auto files = facts.open_files(info.pid);
    if (!files) continue;
    const auto process = Pidfd::open(info.pid);
    if (!process) continue;
    for (const proc::OpenFile& file : *files) {
      if (facts.is_over()) return;
      if (!file.path.starts_with("socket:[") || !seen.insert(file.path).second) continue;
      auto copy = proc::take_nameless(info.pid, *process, file.descriptor);
      if (!copy) continue;
      const ino_t network = network_of_socket(*copy);
      if (all_are_known && network != 0 && !networks.contains(network)) {
        out.add(info.pid, kForeign,
                fmt::format("descriptor {} (net:[{}])", file.descriptor, network));
      } else {
        probe_one(info.pid, file.descriptor, *copy, tcp_close, out);
        if (const auto kind = proc::socket_kind(*copy))
          unseen.note(info.pid, file.descriptor,
                      network != 0 ? network : facts.namespace_of(info.pid, "net"), *copy, *kind);
      }
      dropped.add(std::move(*copy));
    }
  }
  unseen.finish();
}

}  // namespace stasis::doctor
