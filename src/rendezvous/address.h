// Where the part that serves is reached: "tcp://HOST:PORT" as the user has written it.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis::rendezvous {

inline constexpr std::string_view kScheme = "tcp://";

struct HostPort {
  std::string host;  // a name, or an address without brackets
  std::uint16_t port = 0;
};
// kUsage. An IPv6 address stands in brackets.
Result<HostPort> parse_host_port(const std::string& text);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};
// In the order in which they are to be tried, eight at most. kUsage where there is none, or where a
// name means this machine for itself alone: on another node it would mean that one. May wait for
// the name service.
Result<std::vector<SocketAddress>> resolve(const HostPort& where);

// Listens at those of the addresses that this machine has. Empty if it has none, or one is in use:
// then another part may serve there. kNotPermitted for a port that this user may not use; kIo.
Result<std::vector<UniqueFd>> listen_at(const std::vector<SocketAddress>& addresses);

// Neither waits.
Result<UniqueFd> stream_socket(int family);
void set_no_delay(const UniqueFd& socket);

}  // namespace stasis::rendezvous
