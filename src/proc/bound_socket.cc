#include "proc/bound_socket.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::proc {
namespace {

constexpr std::size_t kFourInSix = 12;  // where the address of IPv4 lies in one of IPv6

in_addr four_of(const in6_addr& address) {
  in_addr four{};
  std::memcpy(&four, &address.s6_addr[kFourInSix], sizeof four);
  return four;
}

bool bind_four(int socket, const BoundSocket& to) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(to.port);
  name.sin_addr = four_of(to.address);
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
}

bool bind_six(int socket, const BoundSocket& to) {
  sockaddr_in6 name{};
  name.sin6_family = AF_INET6;
  name.sin6_port = htons(to.port);
  name.sin6_addr = to.address;
  if (!to.interface.empty()) name.sin6_scope_id = ::if_nametoindex(to.interface.c_str());
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
}

}  // namespace

bool BoundSocket::takes(const in6_addr& local) const {
  const bool local_is_four = IN6_IS_ADDR_V4MAPPED(&local) != 0;
  if (is_four && four_of(address).s_addr == INADDR_ANY) return local_is_four;
  if (!is_four && IN6_IS_ADDR_UNSPECIFIED(&address)) return !only_six || !local_is_four;
  return std::memcmp(&address, &local, sizeof local) == 0;
}

std::string BoundSocket::text() const {
  std::array<char, INET6_ADDRSTRLEN> name{};
  const in_addr four = four_of(address);
  const void* bytes = is_four ? static_cast<const void*>(&four) : &address;
  (void)::inet_ntop(is_four ? AF_INET : AF_INET6, bytes, name.data(), name.size());
  return fmt::format("{}{}{}:{}", is_four ? "" : "[", name.data(), is_four ? "" : "]", port);
}

bool is_taken(const BoundSocket& socket) {
  const UniqueFd ours(::socket(socket.is_four ? AF_INET : AF_INET6,
                               (socket.is_tcp ? SOCK_STREAM : SOCK_DGRAM) | SOCK_CLOEXEC, 0));
  if (!ours.valid()) return false;
  const auto set = [&](int level, int name) {
    const int yes = 1;
    return ::setsockopt(ours.get(), level, name, &yes, sizeof yes) == 0;
  };
  // As CRIU has it while it makes sockets (open_inet_sk() of criu/sk-inet.c).
  if (!set(SOL_SOCKET, SO_REUSEADDR) || !set(SOL_SOCKET, SO_REUSEPORT)) return false;
  // An address that is not here is another matter.
  if (!set(SOL_IP, IP_FREEBIND)) return false;
  if (socket.only_six && !set(SOL_IPV6, IPV6_V6ONLY)) return false;
  if (!socket.device.empty() &&
      ::setsockopt(ours.get(), SOL_SOCKET, SO_BINDTODEVICE, socket.device.data(),
                   static_cast<socklen_t>(socket.device.size())) != 0)
    return false;
  const bool is_bound =
      socket.is_four ? bind_four(ours.get(), socket) : bind_six(ours.get(), socket);
  return !is_bound && errno == EADDRINUSE;
}

}  // namespace stasis::proc
