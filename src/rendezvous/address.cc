#include "rendezvous/address.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <utility>

#include <fmt/format.h>

namespace stasis::rendezvous {
namespace {

constexpr std::size_t kMostHost = 253;
constexpr std::size_t kMostAddresses = 8;
constexpr int kBacklog = 1024;

tl::unexpected<Error> no_address(const std::string& text) {
  return fail(ErrorCode::kUsage, fmt::format("'{}' is no address of a group", text),
              "write tcp://HOST:PORT, an IPv6 address in brackets: tcp://[fd00::1]:7777");
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    sockaddr_in inet{};
    std::memcpy(&inet, &address, sizeof inet);
    return ntohl(inet.sin_addr.s_addr) >> 24 == 127;
  }
  sockaddr_in6 inet6{};
  std::memcpy(&inet6, &address, sizeof inet6);
  return IN6_IS_ADDR_LOOPBACK(&inet6.sin6_addr) != 0;
}

// No address at which one machine is reached.
bool is_of_none(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    sockaddr_in inet{};
    std::memcpy(&inet, &address, sizeof inet);
    const auto number = ntohl(inet.sin_addr.s_addr);
    return number == INADDR_ANY || number == INADDR_BROADCAST || IN_MULTICAST(number);
  }
  sockaddr_in6 inet6{};
  std::memcpy(&inet6, &address, sizeof inet6);
  return IN6_IS_ADDR_UNSPECIFIED(&inet6.sin6_addr) != 0 ||
         IN6_IS_ADDR_MULTICAST(&inet6.sin6_addr) != 0;
}

}  // namespace

Result<HostPort> parse_host_port(const std::string& text) {
  if (!text.starts_with(kScheme)) return no_address(text);
  const std::string_view rest = std::string_view(text).substr(kScheme.size());
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) return no_address(text);
  HostPort out;
  std::string_view host = rest.substr(0, colon);
  const bool in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (in_brackets) host = host.substr(1, host.size() - 2);
  const std::string_view port = rest.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  const bool is_one = error == std::errc() && end == port.data() + port.size() && out.port > 0 &&
                      !host.empty() && host.size() <= kMostHost &&
                      (in_brackets || host.find(':') == std::string_view::npos) &&
                      host.find_first_of("/[]@ ") == std::string_view::npos;
  if (!is_one) return no_address(text);
  out.host = host;
  return out;
}

Result<std::vector<SocketAddress>> resolve(const HostPort& where) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  const std::string port = std::to_string(where.port);
  addrinfo* found = nullptr;
  const bool is_number = ::getaddrinfo(where.host.c_str(), port.c_str(), &hints, &found) == 0;
  hints.ai_flags = 0;
  const int status =
      is_number ? 0 : ::getaddrinfo(where.host.c_str(), port.c_str(), &hints, &found);
  if (status != 0) {
    return fail(ErrorCode::kUsage,
                fmt::format("'{}' has no address: {}", where.host, ::gai_strerror(status)),
                "name a host that all nodes know, or give its address: --group tcp://HOST:PORT");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  const bool may_be_loopback = is_number || where.host == "localhost";
  std::vector<SocketAddress> out;
  bool has_loopback = false;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    if (is_of_none(*one->ai_addr)) continue;
    if (!may_be_loopback && is_loopback(*one->ai_addr)) {
      has_loopback = true;
      continue;
    }
    if (out.size() == kMostAddresses) break;
    SocketAddress address;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
    out.push_back(address);
  }
  if (!out.empty()) return out;
  return fail(
      ErrorCode::kUsage,
      has_loopback
          ? fmt::format("'{}' is a loopback address here, at which no other node reaches it",
                        where.host)
          : fmt::format("'{}' is the address of no node", where.host),
      "give the address that the other nodes know: --group tcp://ADDRESS:PORT");
}

Result<UniqueFd> stream_socket(int family) {
  UniqueFd out(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!out.valid()) return fail(errno_error("cannot make a socket", errno));
  return out;
}

void set_no_delay(const UniqueFd& socket) {
  const int yes = 1;
  (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

Result<std::vector<UniqueFd>> listen_at(const std::vector<SocketAddress>& addresses) {
  std::vector<UniqueFd> out;
  for (const SocketAddress& address : addresses) {
    auto made = stream_socket(address.storage.ss_family);
    if (!made) continue;  // a kernel without IPv6
    const int yes = 1;
    (void)::setsockopt(made->get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (address.storage.ss_family == AF_INET6)
      (void)::setsockopt(made->get(), IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes);
    const bool listens = ::bind(made->get(), reinterpret_cast<const sockaddr*>(&address.storage),
                                address.size) == 0 &&
                         ::listen(made->get(), kBacklog) == 0;
    if (listens) {
      out.push_back(std::move(*made));
      continue;
    }
    if (errno == EADDRINUSE) return std::vector<UniqueFd>();
    if (errno == EADDRNOTAVAIL) continue;
    return fail(errno_error("cannot listen at the group's address", errno));
  }
  return out;
}

}  // namespace stasis::rendezvous
