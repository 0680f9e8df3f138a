// A message over a Unix socket with at most one descriptor beside its bytes (SCM_RIGHTS, unix(7)),
// for all programs that pass memory on: the agent, the tool, and processes of the tool's own.
//
// Blocks unless `flags` say MSG_DONTWAIT. Allocates nothing. Thread-safe.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace stasis {

// All of it. False: errno says why. `fd` -1: without a descriptor.
inline bool send_with_descriptor(int socket, const void* data, std::size_t bytes, int fd,
                                 int flags = 0) {
  iovec content{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
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
  const cmsghdr* header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return got;
  const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof fd;
  for (std::size_t i = 0; i < count; ++i) {
    int one = -1;
    std::memcpy(&one, CMSG_DATA(header) + i * sizeof one, sizeof one);
    if (count == 1)
      fd = one;
    else
      ::close(one);
  }
  return got;
}

}  // namespace stasis
