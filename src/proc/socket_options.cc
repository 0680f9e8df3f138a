#include "proc/socket_options.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include <fmt/format.h>

namespace stasis::proc {
namespace {

enum class Form {
  kBytes,             // set as it is read
  kText,              // a name that ends with a zero
  kInterface,         // the number of an interface
  kNetworkInterface,  // the same in network order
  kMulticastAddress,  // read as an address, set as ip_mreqn
};

enum Where : unsigned {
  kAny = 0,
  kStream = 1,    // TCP
  kDatagram = 2,  // all others
  // Only of a socket without a connection: of one with it the kernel changes the value by itself.
  kIdle = 4,
  kMade = 16,  // of TCP CRIU sets it to make a connection, and leaves it so: noted also if not set
  kNegative = 8,  // -1 means that it was never set, and cannot be set
};

struct Entry {
  int level;
  int name;
  Form form;
  unsigned where;
  const char* text;
};

constexpr int kUdpLite = 136;  // IPPROTO_UDPLITE
constexpr int kNetlink = 270;  // SOL_NETLINK
constexpr int kPacket = 263;   // SOL_PACKET
constexpr int kRaw = 255;      // SOL_RAW
constexpr int kIcmp6 = 58;     // SOL_ICMPV6
constexpr int kUdp = 17;       // SOL_UDP
constexpr int kTcp = 6;        // SOL_TCP
constexpr int kIp6 = 41;       // SOL_IPV6
constexpr int kIp = 0;         // SOL_IP
constexpr int kSocket = 1;     // SOL_SOCKET

// By number, because Debian 12's headers lack some; the names are those of Linux 6.18
// (asm-generic/socket.h, linux/in.h, in6.h, tcp.h, udp.h, netlink.h, if_packet.h). Of SOL_SOCKET
// all but what cannot be set, what a read consumes (SO_ERROR), the buffers' sizes and BINDTODEVICE,
// which CRIU restores, and what is another name of one that is here. The order is that of setting:
// timestamps before the flags that say which form they have, the lock of the filter last.
constexpr std::array kTable = {
    Entry{kSocket, 1, Form::kBytes, kAny, "SO_DEBUG"},
    Entry{kSocket, 2, Form::kBytes, kAny, "SO_REUSEADDR"},
    Entry{kSocket, 5, Form::kBytes, kAny, "SO_DONTROUTE"},
    Entry{kSocket, 6, Form::kBytes, kAny, "SO_BROADCAST"},
    Entry{kSocket, 9, Form::kBytes, kAny, "SO_KEEPALIVE"},
    Entry{kSocket, 10, Form::kBytes, kAny, "SO_OOBINLINE"},
    Entry{kSocket, 11, Form::kBytes, kAny, "SO_NO_CHECK"},
    Entry{kSocket, 12, Form::kBytes, kAny, "SO_PRIORITY"},
    Entry{kSocket, 13, Form::kBytes, kAny, "SO_LINGER"},
    Entry{kSocket, 15, Form::kBytes, kMade, "SO_REUSEPORT"},
    Entry{kSocket, 16, Form::kBytes, kAny, "SO_PASSCRED"},
    Entry{kSocket, 18, Form::kBytes, kAny, "SO_RCVLOWAT"},
    Entry{kSocket, 20, Form::kBytes, kAny, "SO_RCVTIMEO"},
    Entry{kSocket, 21, Form::kBytes, kAny, "SO_SNDTIMEO"},
    Entry{kSocket, 34, Form::kBytes, kAny, "SO_PASSSEC"},
    Entry{kSocket, 36, Form::kBytes, kAny, "SO_MARK"},
    Entry{kSocket, 37, Form::kBytes, kAny, "SO_TIMESTAMPING"},
    Entry{kSocket, 65, Form::kBytes, kAny, "SO_TIMESTAMPING_NEW"},
    Entry{kSocket, 29, Form::kBytes, kAny, "SO_TIMESTAMP"},
    Entry{kSocket, 35, Form::kBytes, kAny, "SO_TIMESTAMPNS"},
    Entry{kSocket, 63, Form::kBytes, kAny, "SO_TIMESTAMP_NEW"},
    Entry{kSocket, 64, Form::kBytes, kAny, "SO_TIMESTAMPNS_NEW"},
    Entry{kSocket, 40, Form::kBytes, kAny, "SO_RXQ_OVFL"},
    Entry{kSocket, 41, Form::kBytes, kAny, "SO_WIFI_STATUS"},
    Entry{kSocket, 42, Form::kBytes, kAny, "SO_PEEK_OFF"},
    Entry{kSocket, 43, Form::kBytes, kAny, "SO_NOFCS"},
    Entry{kSocket, 45, Form::kBytes, kAny, "SO_SELECT_ERR_QUEUE"},
    Entry{kSocket, 46, Form::kBytes, kAny, "SO_BUSY_POLL"},
    Entry{kSocket, 47, Form::kBytes, kAny, "SO_MAX_PACING_RATE"},
    Entry{kSocket, 49, Form::kBytes, kIdle | kNegative, "SO_INCOMING_CPU"},
    Entry{kSocket, 60, Form::kBytes, kAny, "SO_ZEROCOPY"},
    Entry{kSocket, 61, Form::kBytes, kAny, "SO_TXTIME"},
    Entry{kSocket, 69, Form::kBytes, kAny, "SO_PREFER_BUSY_POLL"},
    Entry{kSocket, 70, Form::kBytes, kAny, "SO_BUSY_POLL_BUDGET"},
    Entry{kSocket, 73, Form::kBytes, kAny, "SO_RESERVE_MEM"},
    Entry{kSocket, 74, Form::kBytes, kAny, "SO_TXREHASH"},
    Entry{kSocket, 75, Form::kBytes, kAny, "SO_RCVMARK"},
    Entry{kSocket, 76, Form::kBytes, kAny, "SO_PASSPIDFD"},
    Entry{kSocket, 82, Form::kBytes, kAny, "SO_RCVPRIORITY"},
    Entry{kSocket, 83, Form::kBytes, kAny, "SO_PASSRIGHTS"},
    Entry{kSocket, 84, Form::kBytes, kAny, "SO_INQ"},
    Entry{kSocket, 44, Form::kBytes, kAny, "SO_LOCK_FILTER"},

    Entry{kIp, 1, Form::kBytes, kAny, "IP_TOS"},
    Entry{kIp, 2, Form::kBytes, kAny, "IP_TTL"},
    Entry{kIp, 3, Form::kBytes, kDatagram, "IP_HDRINCL"},
    Entry{kIp, 4, Form::kBytes, kAny, "IP_OPTIONS"},
    Entry{kIp, 5, Form::kBytes, kDatagram, "IP_ROUTER_ALERT"},
    Entry{kIp, 6, Form::kBytes, kAny, "IP_RECVOPTS"},
    Entry{kIp, 7, Form::kBytes, kAny, "IP_RETOPTS"},
    Entry{kIp, 8, Form::kBytes, kAny, "IP_PKTINFO"},
    Entry{kIp, 10, Form::kBytes, kAny, "IP_MTU_DISCOVER"},
    Entry{kIp, 11, Form::kBytes, kAny, "IP_RECVERR"},
    Entry{kIp, 12, Form::kBytes, kAny, "IP_RECVTTL"},
    Entry{kIp, 13, Form::kBytes, kAny, "IP_RECVTOS"},
    Entry{kIp, 15, Form::kBytes, kAny, "IP_FREEBIND"},
    Entry{kIp, 18, Form::kBytes, kAny, "IP_PASSSEC"},
    Entry{kIp, 19, Form::kBytes, kAny, "IP_TRANSPARENT"},
    Entry{kIp, 20, Form::kBytes, kAny, "IP_RECVORIGDSTADDR"},
    Entry{kIp, 21, Form::kBytes, kAny, "IP_MINTTL"},
    Entry{kIp, 22, Form::kBytes, kDatagram, "IP_NODEFRAG"},
    Entry{kIp, 23, Form::kBytes, kAny, "IP_CHECKSUM"},
    Entry{kIp, 24, Form::kBytes, kAny, "IP_BIND_ADDRESS_NO_PORT"},
    Entry{kIp, 25, Form::kBytes, kDatagram, "IP_RECVFRAGSIZE"},
    Entry{kIp, 26, Form::kBytes, kAny, "IP_RECVERR_RFC4884"},
    Entry{kIp, 32, Form::kMulticastAddress, kAny, "IP_MULTICAST_IF"},
    Entry{kIp, 33, Form::kBytes, kDatagram, "IP_MULTICAST_TTL"},
    Entry{kIp, 34, Form::kBytes, kAny, "IP_MULTICAST_LOOP"},
    Entry{kIp, 49, Form::kBytes, kAny, "IP_MULTICAST_ALL"},
    Entry{kIp, 50, Form::kNetworkInterface, kAny, "IP_UNICAST_IF"},
    Entry{kIp, 51, Form::kBytes, kAny, "IP_LOCAL_PORT_RANGE"},

    Entry{kIp6, 2, Form::kBytes, kAny, "IPV6_2292PKTINFO"},
    Entry{kIp6, 3, Form::kBytes, kAny, "IPV6_2292HOPOPTS"},
    Entry{kIp6, 4, Form::kBytes, kAny, "IPV6_2292DSTOPTS"},
    Entry{kIp6, 5, Form::kBytes, kAny, "IPV6_2292RTHDR"},
    Entry{kIp6, 7, Form::kBytes, kDatagram, "IPV6_CHECKSUM"},
    Entry{kIp6, 8, Form::kBytes, kAny, "IPV6_2292HOPLIMIT"},
    Entry{kIp6, 11, Form::kBytes, kAny, "IPV6_FLOWINFO"},
    Entry{kIp6, 16, Form::kBytes, kAny, "IPV6_UNICAST_HOPS"},
    Entry{kIp6, 17, Form::kInterface, kDatagram, "IPV6_MULTICAST_IF"},
    Entry{kIp6, 18, Form::kBytes, kDatagram, "IPV6_MULTICAST_HOPS"},
    Entry{kIp6, 19, Form::kBytes, kAny, "IPV6_MULTICAST_LOOP"},
    Entry{kIp6, 22, Form::kBytes, kDatagram, "IPV6_ROUTER_ALERT"},
    Entry{kIp6, 23, Form::kBytes, kAny, "IPV6_MTU_DISCOVER"},
    Entry{kIp6, 25, Form::kBytes, kAny, "IPV6_RECVERR"},
    Entry{kIp6, 29, Form::kBytes, kAny, "IPV6_MULTICAST_ALL"},
    Entry{kIp6, 30, Form::kBytes, kAny, "IPV6_ROUTER_ALERT_ISOLATE"},
    Entry{kIp6, 31, Form::kBytes, kAny, "IPV6_RECVERR_RFC4884"},
    Entry{kIp6, 33, Form::kBytes, kAny, "IPV6_FLOWINFO_SEND"},
    Entry{kIp6, 36, Form::kBytes, kDatagram, "IPV6_HDRINCL"},
    Entry{kIp6, 49, Form::kBytes, kAny, "IPV6_RECVPKTINFO"},
    Entry{kIp6, 51, Form::kBytes, kAny, "IPV6_RECVHOPLIMIT"},
    Entry{kIp6, 53, Form::kBytes, kAny, "IPV6_RECVHOPOPTS"},
    Entry{kIp6, 54, Form::kBytes, kAny, "IPV6_HOPOPTS"},
    Entry{kIp6, 55, Form::kBytes, kAny, "IPV6_RTHDRDSTOPTS"},
    Entry{kIp6, 56, Form::kBytes, kAny, "IPV6_RECVRTHDR"},
    Entry{kIp6, 57, Form::kBytes, kAny, "IPV6_RTHDR"},
    Entry{kIp6, 58, Form::kBytes, kAny, "IPV6_RECVDSTOPTS"},
    Entry{kIp6, 59, Form::kBytes, kAny, "IPV6_DSTOPTS"},
    Entry{kIp6, 60, Form::kBytes, kAny, "IPV6_RECVPATHMTU"},
    Entry{kIp6, 62, Form::kBytes, kAny, "IPV6_DONTFRAG"},
    Entry{kIp6, 66, Form::kBytes, kAny, "IPV6_RECVTCLASS"},
    Entry{kIp6, 67, Form::kBytes, kAny, "IPV6_TCLASS"},
    Entry{kIp6, 70, Form::kBytes, kAny, "IPV6_AUTOFLOWLABEL"},
    Entry{kIp6, 72, Form::kBytes, kAny, "IPV6_ADDR_PREFERENCES"},
    Entry{kIp6, 73, Form::kBytes, kAny, "IPV6_MINHOPCOUNT"},
    Entry{kIp6, 74, Form::kBytes, kAny, "IPV6_RECVORIGDSTADDR"},
    Entry{kIp6, 75, Form::kBytes, kAny, "IPV6_TRANSPARENT"},
    Entry{kIp6, 76, Form::kNetworkInterface, kAny, "IPV6_UNICAST_IF"},
    Entry{kIp6, 77, Form::kBytes, kAny, "IPV6_RECVFRAGSIZE"},
    Entry{kIp6, 78, Form::kBytes, kAny, "IPV6_FREEBIND"},

    Entry{kTcp, 1, Form::kBytes, kStream, "TCP_NODELAY"},
    Entry{kTcp, 2, Form::kBytes, kStream | kIdle, "TCP_MAXSEG"},
    Entry{kTcp, 3, Form::kBytes, kStream, "TCP_CORK"},
    Entry{kTcp, 4, Form::kBytes, kStream, "TCP_KEEPIDLE"},
    Entry{kTcp, 5, Form::kBytes, kStream, "TCP_KEEPINTVL"},
    Entry{kTcp, 6, Form::kBytes, kStream, "TCP_KEEPCNT"},
    Entry{kTcp, 7, Form::kBytes, kStream, "TCP_SYNCNT"},
    Entry{kTcp, 8, Form::kBytes, kStream, "TCP_LINGER2"},
    Entry{kTcp, 9, Form::kBytes, kStream, "TCP_DEFER_ACCEPT"},
    Entry{kTcp, 10, Form::kBytes, kStream | kIdle, "TCP_WINDOW_CLAMP"},
    Entry{kTcp, 12, Form::kBytes, kStream | kIdle, "TCP_QUICKACK"},
    Entry{kTcp, 13, Form::kText, kStream, "TCP_CONGESTION"},
    Entry{kTcp, 16, Form::kBytes, kStream, "TCP_THIN_LINEAR_TIMEOUTS"},
    Entry{kTcp, 18, Form::kBytes, kStream, "TCP_USER_TIMEOUT"},
    Entry{kTcp, 23, Form::kBytes, kStream | kIdle, "TCP_FASTOPEN"},
    Entry{kTcp, 25, Form::kBytes, kStream, "TCP_NOTSENT_LOWAT"},
    Entry{kTcp, 27, Form::kBytes, kStream, "TCP_SAVE_SYN"},
    Entry{kTcp, 30, Form::kBytes, kStream | kIdle, "TCP_FASTOPEN_CONNECT"},
    Entry{kTcp, 33, Form::kBytes, kStream | kIdle, "TCP_FASTOPEN_KEY"},
    Entry{kTcp, 34, Form::kBytes, kStream | kIdle, "TCP_FASTOPEN_NO_COOKIE"},
    Entry{kTcp, 36, Form::kBytes, kStream, "TCP_INQ"},
    Entry{kTcp, 37, Form::kBytes, kStream, "TCP_TX_DELAY"},
    Entry{kTcp, 44, Form::kBytes, kStream, "TCP_RTO_MAX_MS"},
    Entry{kTcp, 45, Form::kBytes, kStream, "TCP_RTO_MIN_US"},
    Entry{kTcp, 46, Form::kBytes, kStream, "TCP_DELACK_MAX_US"},

    Entry{kUdp, 100, Form::kBytes, kDatagram, "UDP_ENCAP"},
    Entry{kUdp, 101, Form::kBytes, kDatagram, "UDP_NO_CHECK6_TX"},
    Entry{kUdp, 102, Form::kBytes, kDatagram, "UDP_NO_CHECK6_RX"},
    Entry{kUdp, 103, Form::kBytes, kDatagram, "UDP_SEGMENT"},
    Entry{kUdp, 104, Form::kBytes, kDatagram, "UDP_GRO"},
    Entry{kUdpLite, 10, Form::kBytes, kDatagram, "UDPLITE_SEND_CSCOV"},
    Entry{kUdpLite, 11, Form::kBytes, kDatagram, "UDPLITE_RECV_CSCOV"},
    Entry{kRaw, 1, Form::kBytes, kDatagram, "ICMP_FILTER"},
    Entry{kIcmp6, 1, Form::kBytes, kDatagram, "ICMPV6_FILTER"},

    Entry{kNetlink, 3, Form::kBytes, kAny, "NETLINK_PKTINFO"},
    Entry{kNetlink, 4, Form::kBytes, kAny, "NETLINK_BROADCAST_ERROR"},
    Entry{kNetlink, 5, Form::kBytes, kAny, "NETLINK_NO_ENOBUFS"},
    Entry{kNetlink, 8, Form::kBytes, kAny, "NETLINK_LISTEN_ALL_NSID"},
    Entry{kNetlink, 10, Form::kBytes, kAny, "NETLINK_CAP_ACK"},
    Entry{kNetlink, 11, Form::kBytes, kAny, "NETLINK_EXT_ACK"},
    Entry{kNetlink, 12, Form::kBytes, kAny, "NETLINK_GET_STRICT_CHK"},

    Entry{kPacket, 17, Form::kBytes, kAny, "PACKET_TIMESTAMP"},
    Entry{kPacket, 19, Form::kBytes, kAny, "PACKET_TX_HAS_OFF"},
    Entry{kPacket, 20, Form::kBytes, kAny, "PACKET_QDISC_BYPASS"},
    Entry{kPacket, 23, Form::kBytes, kAny, "PACKET_IGNORE_OUTGOING"},
    Entry{kPacket, 24, Form::kBytes, kAny, "PACKET_VNET_HDR_SZ"},
};

constexpr std::size_t kLongest = 64;  // the table's longest are IP_OPTIONS (40) and ICMPV6_FILTER

std::optional<std::string> get(const UniqueFd& socket, int level, int name) {
  std::array<char, kLongest> buffer{};
  socklen_t size = buffer.size();
  if (::getsockopt(socket.get(), level, name, buffer.data(), &size) != 0 || size > buffer.size())
    return std::nullopt;
  return std::string(buffer.data(), size);
}

std::optional<int> get_number(const UniqueFd& socket, int level, int name) {
  const auto value = get(socket, level, name);
  int number = 0;
  if (!value || value->size() != sizeof number) return std::nullopt;
  std::memcpy(&number, value->data(), sizeof number);
  return number;
}

std::string bytes_of(int number) { return {reinterpret_cast<const char*>(&number), sizeof number}; }

bool is_tcp(const SocketKind& kind) {
  return (kind.domain == AF_INET || kind.domain == AF_INET6) && kind.type == SOCK_STREAM;
}

bool may_have(const Entry& entry, const SocketKind& kind) {
  const bool inet = kind.domain == AF_INET || kind.domain == AF_INET6;
  if ((entry.where & kStream) != 0 && !is_tcp(kind)) return false;
  if ((entry.where & kDatagram) != 0 && is_tcp(kind)) return false;
  switch (entry.level) {
    case kSocket:
      return true;
    case kIp:
      return kind.domain == AF_INET || (kind.domain == AF_INET6 && kind.type != SOCK_RAW);
    case kIp6:
      return kind.domain == AF_INET6;
    case kTcp:
      return inet;
    case kUdp:
      return inet && kind.type == SOCK_DGRAM;
    case kUdpLite:
      return inet && kind.protocol == kUdpLite;
    case kRaw:
      return kind.domain == AF_INET && kind.type == SOCK_RAW;
    case kIcmp6:
      return kind.domain == AF_INET6 && kind.type == SOCK_RAW && kind.protocol == kIcmp6;
    case kNetlink:
      return kind.domain == AF_NETLINK;
    case kPacket:
      return kind.domain == AF_PACKET;
    default:
      return false;
  }
}

// A TCP socket that has, or had, a connection.
bool is_connected(const UniqueFd& socket, const SocketKind& kind) {
  if (!is_tcp(kind)) return false;
  std::array<char, kLongest> info{};  // the first byte is the state
  socklen_t size = info.size();
  if (::getsockopt(socket.get(), kTcp, TCP_INFO, info.data(), &size) != 0 || size == 0) return true;
  return info[0] != TCP_CLOSE && info[0] != TCP_LISTEN;
}

bool listens(const UniqueFd& socket) {
  return get_number(socket, SOL_SOCKET, SO_ACCEPTCONN).value_or(0) != 0;
}

// In the form in which it is kept; nothing if the socket has no such option.
std::optional<std::string> read_option(const UniqueFd& socket, const Entry& entry) {
  auto value = get(socket, entry.level, entry.name);
  if (!value) return std::nullopt;
  switch (entry.form) {
    case Form::kText:
      value->resize(std::min(value->find('\0'), value->size()));
      return value;
    case Form::kInterface:
    case Form::kNetworkInterface: {
      std::uint32_t number = 0;
      if (value->size() != sizeof number) return std::nullopt;
      std::memcpy(&number, value->data(), sizeof number);
      if (entry.form == Form::kNetworkInterface) number = ntohl(number);
      return number == 0 ? std::string() : interface_name(socket, number);
    }
    case Form::kBytes:
    case Form::kMulticastAddress:
      break;
  }
  return value;
}

// errno, or 0.
int write_option(const UniqueFd& socket, const Entry& entry, const std::string& value) {
  std::string bytes = value;
  if (entry.form == Form::kInterface || entry.form == Form::kNetworkInterface) {
    const unsigned index = value.empty() ? 0 : interface_index(socket, value);
    if (index == 0 && !value.empty()) return ENODEV;
    const std::uint32_t number = entry.form == Form::kInterface ? index : htonl(index);
    bytes = bytes_of(static_cast<int>(number));
  } else if (entry.form == Form::kMulticastAddress) {
    ip_mreqn request{};
    if (value.size() != sizeof request.imr_address) return EINVAL;
    std::memcpy(&request.imr_address, value.data(), value.size());
    bytes.assign(reinterpret_cast<const char*>(&request), sizeof request);
  }
  const auto size = static_cast<socklen_t>(bytes.size());
  return ::setsockopt(socket.get(), entry.level, entry.name, bytes.data(), size) == 0 ? 0 : errno;
}

}  // namespace

std::optional<SocketKind> socket_kind(const UniqueFd& socket) {
  const auto domain = get_number(socket, SOL_SOCKET, SO_DOMAIN);
  const auto type = get_number(socket, SOL_SOCKET, SO_TYPE);
  const auto protocol = get_number(socket, SOL_SOCKET, SO_PROTOCOL);
  if (!domain || !type || !protocol) return std::nullopt;
  return SocketKind{*domain, *type, *protocol};
}

bool SocketKind::is_inet() const { return domain == AF_INET || domain == AF_INET6; }

bool is_connection(const UniqueFd& socket, const proc::SocketKind& kind) {
  if (kind.type != SOCK_STREAM) return false;
  std::array<unsigned char, 8> info{};  // the first byte is the state
  socklen_t size = info.size();
  return ::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, info.data(), &size) == 0 && size > 0 &&
         info[0] != TCP_CLOSE && info[0] != TCP_LISTEN;
}

ino_t network_of(Pid pid) {
  struct stat info {};
  return ::stat(fmt::format("/proc/{}/ns/net", pid.value).c_str(), &info) == 0 ? info.st_ino : 0;
}

bool has_input(const UniqueFd& file) {
  pollfd poll{file.get(), POLLIN, 0};
  return ::poll(&poll, 1, 0) == 1 && (poll.revents & POLLIN) != 0;
}

bool peeks_behind(const UniqueFd& socket) {
  int bytes = 0;
  return get_number(socket, SOL_SOCKET, SO_PEEK_OFF).value_or(-1) >= 0 &&
         ::ioctl(socket.get(), SIOCINQ, &bytes) == 0 && bytes > 0;
}

bool has_error(const UniqueFd& file) {
  pollfd poll{file.get(), 0, 0};
  return ::poll(&poll, 1, 0) == 1 && (poll.revents & POLLERR) != 0;
}

const SocketOptions::Values& SocketOptions::defaults(const SocketKind& kind) {
  const auto [it, is_new] = defaults_.try_emplace(kind);
  if (!is_new) return it->second;
  // Without the right to make one (raw sockets) all that can be read counts as changed.
  const UniqueFd fresh(::socket(kind.domain, kind.type | SOCK_CLOEXEC, kind.protocol));
  if (!fresh.valid()) return it->second;
  for (const Entry& entry : kTable) {
    if (!may_have(entry, kind)) continue;
    if (auto value = read_option(fresh, entry))
      it->second.emplace(std::pair(entry.level, entry.name), std::move(*value));
  }
  return it->second;
}

std::vector<SocketOption> SocketOptions::changed(const UniqueFd& socket, const SocketKind& kind) {
  const Values& usual = defaults(kind);
  const bool connected = is_connected(socket, kind);
  std::vector<SocketOption> out;
  for (const Entry& entry : kTable) {
    if (!may_have(entry, kind) || (connected && (entry.where & kIdle) != 0)) continue;
    auto value = read_option(socket, entry);
    if (!value || ((entry.where & kNegative) != 0 && *value == bytes_of(-1))) continue;
    const auto known = usual.find({entry.level, entry.name});
    const bool is_made = (entry.where & kMade) != 0 && is_tcp(kind) && !listens(socket);
    if (known != usual.end() && known->second == *value && !is_made) continue;
    out.push_back({entry.level, entry.name, std::move(*value)});
  }
  return out;
}

std::vector<std::string> SocketOptions::set(const UniqueFd& socket, const SocketKind& kind,
                                            const std::vector<SocketOption>& options) {
  std::vector<std::string> failed;
  for (const Entry& entry : kTable) {
    const auto wanted =
        std::find_if(options.begin(), options.end(), [&](const SocketOption& option) {
          return option.level == entry.level && option.name == entry.name;
        });
    if (wanted == options.end() || !may_have(entry, kind)) continue;
    if (read_option(socket, entry) == wanted->value) continue;
    const int why = write_option(socket, entry, wanted->value);
    if (why == 0 && read_option(socket, entry) == wanted->value) continue;
    failed.push_back(
        std::string(entry.text) + ": " +
        (why == 0 ? "the kernel takes another value" : std::generic_category().message(why)));
  }
  return failed;
}

std::string interface_name(const UniqueFd& socket, unsigned index) {
  ifreq request{};
  request.ifr_ifindex = static_cast<int>(index);
  if (::ioctl(socket.get(), SIOCGIFNAME, &request) != 0) return {};
  return {request.ifr_name, ::strnlen(request.ifr_name, sizeof request.ifr_name)};
}

unsigned interface_index(const UniqueFd& socket, std::string_view name) {
  ifreq request{};
  if (name.empty() || name.size() >= sizeof request.ifr_name) return 0;
  std::memcpy(request.ifr_name, name.data(), name.size());
  if (::ioctl(socket.get(), SIOCGIFINDEX, &request) != 0 || request.ifr_ifindex < 0) return 0;
  return static_cast<unsigned>(request.ifr_ifindex);
}

}  // namespace stasis::proc
