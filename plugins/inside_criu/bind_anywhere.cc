// Lets criu bind sockets to addresses that the machine does not have.
//
// A program may: by IP_FREEBIND and IP_TRANSPARENT. CRIU 4.2.1 sets the first only when it has
// bound the socket, and the second never (inet_bind() of criu/sk-inet.c; of IPv6 it sets it
// before). The tool loads this into a criu whose image has such sockets; it has looked before
// whether the machine has the addresses that the others need. A criu that does not load it fails to
// restore them.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "inside_criu/table.h"

namespace {

long bind_by_kernel(int socket, const void* address, socklen_t size) {
  return ::syscall(SYS_bind, socket, address, size);
}

}  // namespace

extern "C" {

int bind(int fd, const sockaddr* addr, socklen_t len) noexcept {
  const long result = bind_by_kernel(fd, addr, len);
  const bool is_elsewhere = result != 0 && errno == EADDRNOTAVAIL;
  if (!is_elsewhere || !stasis::inside_criu::binds_anywhere || addr->sa_family != AF_INET)
    return static_cast<int>(result);
  const int yes = 1;
  const int no = 0;
  if (::setsockopt(fd, SOL_IP, IP_FREEBIND, &yes, sizeof yes) != 0) {
    errno = EADDRNOTAVAIL;
    return -1;
  }
  const long again = bind_by_kernel(fd, addr, len);
  const int why = errno;
  // What the program has of it comes from the image.
  (void)::setsockopt(fd, SOL_IP, IP_FREEBIND, &no, sizeof no);
  errno = why;
  return static_cast<int>(again);
}

}  // extern "C"
