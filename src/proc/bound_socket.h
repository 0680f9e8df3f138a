// An address and port to which a socket of TCP or UDP is bound, and whether another one has them.
//
// Asks the kernel, in this process's network namespace. Any thread.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <string>

namespace stasis::proc {

struct BoundSocket {
  in6_addr address{};  // IPv4: ::ffff:a.b.c.d; all zero at its end: every address
  std::uint16_t port = 0;
  bool is_tcp = true;     // or UDP
  bool is_four = false;   // a socket of IPv4
  bool only_six = false;  // IPV6_V6ONLY
  std::string device;     // to which it is bound besides (SO_BINDTODEVICE); empty: none
  std::string interface;  // of an address that is one link's; empty: none

  // What is sent to this address, at the port, may be this socket's.
  bool takes(const in6_addr& local) const;
  // "127.0.0.1:80", "[::1]:80".
  std::string text() const;
};

// Another socket is in the way of one that CRIU makes there. The kernel is asked by binding one for
// an instant, as CRIU does: which sockets go together is decided by their addresses, families,
// devices, users and options. False where that cannot be tried.
bool is_taken(const BoundSocket& socket);

}  // namespace stasis::proc
