// Descriptors beside the bytes of a message over a Unix socket (SCM_RIGHTS, unix(7)), for all
// programs that pass them on: the agent, the tool, processes of the tool's own, the simulated
// driver. base/channel.h makes owners of them.
//
// Blocks unless `flags` say MSG_DONTWAIT. Allocates nothing. Thread-safe.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace stasis {

// Puts descriptors beside a message's bytes. `control` is aligned as a cmsghdr, has
// CMSG_SPACE(count * sizeof(int)) bytes, and outlives the sendmsg().
inline void put_descriptors(msghdr& message, void* control, const int* fds, std::size_t count) {
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(count * sizeof *fds);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof *fds);
  std::memcpy(CMSG_DATA(header), fds, count * sizeof *fds);
}

// Calls take(fd) for each descriptor that came with a received message; they are the callee's.
template <class Take>
void take_descriptors(msghdr& message, const Take& take) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      take(fd);
    }
  }
}

// All of it. False: errno says why. `fd` -1: without a descriptor.
inline bool send_with_descriptor(int socket, const void* data, std::size_t bytes, int fd,
                                 int flags = 0) {
  iovec content{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (fd >= 0) put_descriptors(message, control, &fd, 1);
  ssize_t sent = -1;
  do {
    sent = ::sendmsg(socket, &message, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes);
}

// At most `bytes` of one message: how many, 0 at the end of the other side, negative with errno.
// `fd`: the descriptor that came with them, for the caller to close; -1 if there is not exactly
// one. The kernel gives as many as there is room for, and one leaves room for two.
inline ssize_t receive_with_descriptor(int socket, void* data, std::size_t bytes, int& fd,
                                       int flags = 0) {
  iovec content{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = -1;
  do {
    got = ::recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  fd = -1;
  if (got <= 0) return got;
  std::size_t count = 0;
  take_descriptors(message, [&](int one) {
    if (++count == 1)
      fd = one;
    else
      ::close(one);
  });
  if (count > 1) {
    ::close(fd);
    fd = -1;
  }
  return got;
}

}  // namespace stasis
