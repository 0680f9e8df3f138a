#include "doctor/criu_unseen.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace stasis::doctor {
namespace {

constexpr Kind kKeys{
    "tcp-keys", Severity::kRed,
    "has TCP sockets with keys that sign what they send (TCP_MD5SIG, TCP_AO_ADD_KEY), which a "
    "restore forgets: the other end takes nothing from them then, and a listener takes what is not "
    "signed",
    "close them before the dump, or take their keys away"};
constexpr Kind kSharingPort{
    "unseen-options", Severity::kYellow,
    "has sockets that share an address and port (SO_REUSEPORT): a program that chooses among them "
    "(SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF), if they have one, is lost by a restore",
    "let the program attach it again; without one nothing changes"};
constexpr Kind kFanout{
    "unseen-options", Severity::kYellow,
    "has packet sockets in a group in which a program chooses among them (PACKET_FANOUT_CBPF, "
    "PACKET_FANOUT_EBPF), which a restore loses",
    "let the program attach it again (PACKET_FANOUT_DATA)"};
constexpr Kind kInterface{
    "unseen-options", Severity::kYellow,
    "has sockets that may send to multicast groups: the interface for that, if the program has set "
    "it by its number alone (IP_MULTICAST_IF), is lost by a restore",
    "let the program set it with an address of the interface; without it nothing changes"};
constexpr Kind kAnycast{
    "unseen-options", Severity::kYellow,
    "has sockets of IPv6 in a network in which a socket has joined an anycast address "
    "(IPV6_JOIN_ANYCAST): if it is one of these, a restore loses that",
    "let the program join it again"};
constexpr Kind kLabel{
    "unseen-options", Severity::kYellow,
    "has sockets of IPv6 in a network in which a socket has a flow label (IPV6_FLOWLABEL_MGR): if "
    "it is one of these, a restore loses that",
    "let the program ask for it again"};

std::optional<int> number_of(const UniqueFd& socket, int level, int name) {
  int value = 0;
  socklen_t size = sizeof value;
  if (::getsockopt(socket.get(), level, name, &value, &size) != 0) return std::nullopt;
  // Some are a byte to who asks for less.
  return value;
}

bool is_shared_out_by_program(const UniqueFd& socket) {
  constexpr int kTypeShift = 16;
  constexpr int kFlagsMask = 0xff;
  const int type =
      (number_of(socket, SOL_PACKET, PACKET_FANOUT).value_or(0) >> kTypeShift) & kFlagsMask;
  return type == PACKET_FANOUT_CBPF || type == PACKET_FANOUT_EBPF;
}

std::optional<sockaddr_storage> peer_of(const UniqueFd& socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0)
    return std::nullopt;
  return peer;
}

bool is_group(const sockaddr_storage& address) {
  if (address.ss_family != AF_INET) return false;
  const auto& four = reinterpret_cast<const sockaddr_in&>(address);
  return IN_MULTICAST(ntohl(four.sin_addr.s_addr));
}

std::string network_file(Pid pid, const char* name) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/net/{}", pid.value, name));
  return text ? *text : std::string();
}

// 32 digits, as the kernel's tables have it.
std::optional<in6_addr> address_in(const std::string& text) {
  in6_addr out{};
  constexpr std::size_t kDigits = 2 * sizeof out.s6_addr;
  if (text.size() != kDigits || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return std::nullopt;
  for (std::size_t i = 0; i < sizeof out.s6_addr; ++i)
    out.s6_addr[i] = static_cast<std::uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return out;
}

in6_addr prefix_of(in6_addr address, unsigned bits) {
  for (unsigned bit = bits; bit < 8 * sizeof address.s6_addr; ++bit)
    address.s6_addr[bit / 8] &= static_cast<std::uint8_t>(~(0x80U >> (bit % 8)));
  return address;
}

std::string shown(const in6_addr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  (void)::inet_ntop(AF_INET6, &address, text.data(), text.size());
  return text.data();
}

}  // namespace

std::string joined_anycast(const std::string& anycast, const std::string& addresses) {
  struct Own {
    in6_addr prefix;
    std::string interface;
  };
  std::vector<Own> own;
  std::istringstream of_interfaces(addresses);
  for (std::string line; std::getline(of_interfaces, line);) {
    std::istringstream words(line);
    std::string address;
    std::string interface;
    unsigned index = 0;
    unsigned bits = 0;
    unsigned scope = 0;
    unsigned flags = 0;
    words >> address >> std::hex >> index >> bits >> scope >> flags >> interface;
    const auto number = address_in(address);
    if (words && number) own.push_back({prefix_of(*number, bits), interface});
  }
  std::istringstream of_anycast(anycast);
  for (std::string line; std::getline(of_anycast, line);) {
    std::istringstream words(line);
    int index = 0;
    std::string interface;
    std::string address;
    long users = 0;
    if (!(words >> index >> interface >> address >> users)) continue;
    const auto number = address_in(address);
    if (!number) continue;
    // That of all routers of a subnet, once for each address of the machine in it.
    const auto of_kernel = std::count_if(own.begin(), own.end(), [&](const Own& one) {
      return one.interface == interface && IN6_ARE_ADDR_EQUAL(&one.prefix, &*number);
    });
    if (users > of_kernel) return fmt::format("{} on {}", shown(*number), interface);
  }
  return {};
}

std::string leased_label(const std::string& labels, const Processes& processes) {
  constexpr int kOfProcess = 2;  // IPV6_FL_S_PROCESS of linux/in6.h
  std::istringstream lines(labels);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string label;
    int sharing = 0;
    int owner = 0;
    int users = 0;
    if (!(words >> label >> sharing >> owner >> users) || users <= 0) continue;
    const bool is_of_tree =
        std::any_of(processes.begin(), processes.end(),
                    [&](const proc::ProcessInfo& info) { return info.pid.value == owner; });
    // One that is of a process of another PID namespace has none here.
    if (sharing != kOfProcess || is_of_tree || owner == 0) return label;
  }
  return {};
}

void UnseenOptions::note(Pid pid, int descriptor, ino_t network, const UniqueFd& socket,
                         const proc::SocketKind& kind) {
  if (kind.domain == AF_PACKET && is_shared_out_by_program(socket))
    out_.add(pid, kFanout, fmt::format("descriptor {}", descriptor));
  if (!kind.is_inet()) return;
  if (kind.domain == AF_INET6) with_six_.try_emplace(network, pid);
  const bool is_kept = !tcp_close_ || !proc::is_connection(socket, kind);
  if (is_kept && keys_.has_key(pid, network, socket, kind))
    out_.add(pid, kKeys, fmt::format("descriptor {}", descriptor));
  note_sharing(pid, descriptor, network, socket, kind);
  if (kind.type != SOCK_STREAM && may_send_to_groups(pid, network, socket, kind))
    out_.add(pid, kInterface, fmt::format("descriptor {}", descriptor));
}

void UnseenOptions::note_sharing(Pid pid, int descriptor, ino_t network, const UniqueFd& socket,
                                 const proc::SocketKind& kind) {
  const bool gets_all = kind.type == SOCK_STREAM
                            ? number_of(socket, SOL_SOCKET, SO_ACCEPTCONN).value_or(0) != 0
                            : kind.type == SOCK_DGRAM && !peer_of(socket);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (!gets_all || number_of(socket, SOL_SOCKET, SO_REUSEPORT).value_or(0) == 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0)
    return;
  const auto port =
      ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                      : reinterpret_cast<const sockaddr_in&>(own).sin_port);
  if (port == 0) return;
  const std::string address(reinterpret_cast<const char*>(&own), size);
  const auto [found, is_new] = sharing_.try_emplace({{network, kind}, address});
  if (is_new) found->second = {pid, port, {}};
  found->second.descriptors.push_back(descriptor);
}

bool UnseenOptions::may_send_to_groups(Pid pid, ino_t network, const UniqueFd& socket,
                                       const proc::SocketKind& kind) {
  if (number_of(socket, IPPROTO_IP, IP_MULTICAST_IF).value_or(1) != 0) return false;
  if (number_of(socket, IPPROTO_IP, IP_MULTICAST_TTL).value_or(1) != 1 ||
      number_of(socket, IPPROTO_IP, IP_MULTICAST_LOOP).value_or(1) != 1)
    return true;
  if (const auto peer = peer_of(socket); peer && is_group(*peer)) return true;
  constexpr std::size_t kMostGroups = 256;
  const auto [groups, is_new] = groups_.try_emplace(network);
  if (is_new) groups->second = proc::multicast_groups(pid, kMostGroups);
  return std::any_of(groups->second.begin(), groups->second.end(),
                     [&](const proc::MulticastGroup& group) {
                       return group.address.find(':') == std::string::npos &&
                              proc::membership(socket, kind, group).has_value();
                     });
}

void UnseenOptions::finish() {
  for (const auto& [key, sharing] : sharing_)
    if (sharing.descriptors.size() > 1)
      out_.add(sharing.pid, kSharingPort,
               fmt::format("port {} ({} sockets)", sharing.port, sharing.descriptors.size()));
  for (const auto& [network, pid] : with_six_) {
    if (const auto found =
            joined_anycast(network_file(pid, "anycast6"), network_file(pid, "if_inet6"));
        !found.empty())
      out_.add(pid, kAnycast, found);
    if (const auto found = leased_label(network_file(pid, "ip6_flowlabel"), processes_);
        !found.empty())
      out_.add(pid, kLabel, found);
  }
}

}  // namespace stasis::doctor
