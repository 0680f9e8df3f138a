// The options of a socket that is another process's too (pidfd_getfd): which of them have not their
// defaults, and how they are set again.
//
// Stateless but for the cache of defaults; one thread at a time. The socket is whatever a process
// has given us: every size is bounded, and no option that is read has an effect (SO_ERROR would).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"

namespace stasis::proc {

struct SocketKind {
  int domain = 0;
  int type = 0;
  int protocol = 0;
  auto operator<=>(const SocketKind&) const = default;
  bool is_inet() const;  // of IPv4 or IPv6
};
// Nothing if it is no socket.
std::optional<SocketKind> socket_kind(const UniqueFd& socket);

// Whether one of TCP is connected, or about to be, or was.
bool is_connection(const UniqueFd& socket, const SocketKind& kind);
// The number of a process's network namespace; 0 if it cannot be seen.
ino_t network_of(Pid pid);

// Is there anything to read: a datagram, a connection, an event? Takes nothing.
bool has_input(const UniqueFd& file);
// Of TCP: has it data to read, and an offset from which MSG_PEEK begins (SO_PEEK_OFF, Linux 6.9)?
bool peeks_behind(const UniqueFd& socket);
// An error that waits to be told, or a message in the error queue.
bool has_error(const UniqueFd& file);

struct SocketOption {
  int level = 0;
  int name = 0;
  std::string value;  // as getsockopt(2) gives it; the name of an interface instead of its number
  bool operator==(const SocketOption&) const = default;
};

// What CRIU 4.2.1 leaves out of a socket's options, and more: all that can be read and set.
class SocketOptions {
 public:
  // Those that have not the value of a new socket of that kind.
  std::vector<SocketOption> changed(const UniqueFd& socket, const SocketKind& kind);
  // Sets what is not so already, in the order of the table. The name of each that cannot be set,
  // with the reason: "TCP_USER_TIMEOUT: Operation not permitted".
  static std::vector<std::string> set(const UniqueFd& socket, const SocketKind& kind,
                                      const std::vector<SocketOption>& options);

 private:
  using Values = std::map<std::pair<int, int>, std::string>;
  const Values& defaults(const SocketKind& kind);
  std::map<SocketKind, Values> defaults_;
};

// The name of an interface of the socket's network namespace; empty if there is none.
std::string interface_name(const UniqueFd& socket, unsigned index);
// 0 if there is none.
unsigned interface_index(const UniqueFd& socket, std::string_view name);

}  // namespace stasis::proc
