#include "base/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "abi/descriptor_message.h"

namespace stasis {
namespace {

constexpr std::size_t kControlSize = CMSG_SPACE(sizeof(int) * Channel::kMostDescriptors);

tl::unexpected<Error> gone() {
  return fail(ErrorCode::kProcessGone, "the process at the other end has ended");
}

}  // namespace

void Channel::shut_down() const {
  if (socket_.valid()) (void)::shutdown(socket_.get(), SHUT_RDWR);
}

Result<std::pair<Channel, Channel>> Channel::pair() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail(errno_error("cannot create a connection between two processes", errno));
  }
  return std::pair(Channel(UniqueFd(ends[0])), Channel(UniqueFd(ends[1])));
}

Result<void> Channel::send(std::span<const std::byte> bytes,
                           std::span<const UniqueFd> descriptors) const {
  if (bytes.empty() || bytes.size() > kMostBytes || descriptors.size() > kMostDescriptors) {
    return fail(ErrorCode::kInternal, "a message of " + std::to_string(bytes.size()) +
                                          " bytes and " + std::to_string(descriptors.size()) +
                                          " descriptors cannot be sent");
  }
  iovec vector{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  alignas(cmsghdr) std::array<char, kControlSize> control{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    std::array<int, kMostDescriptors> fds;
    std::transform(descriptors.begin(), descriptors.end(), fds.begin(),
                   [](const UniqueFd& fd) { return fd.get(); });
    put_descriptors(message, control.data(), fds.data(), descriptors.size());
  }
  const auto sent = TEMP_FAILURE_RETRY(::sendmsg(socket_.get(), &message, MSG_NOSIGNAL));
  if (sent == static_cast<ssize_t>(bytes.size())) return {};
  if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return gone();
  if (sent < 0 && errno == ETOOMANYREFS) {
    return fail(ErrorCode::kIo, "too many open files are on their way between processes",
                "raise the limit of open files (ulimit -n)");
  }
  return fail(errno_error("cannot send to another process", sent < 0 ? errno : EIO));
}

void Channel::send_if_it_reads(std::span<const std::byte> bytes) const {
  (void)!::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

Result<std::optional<Channel::Message>> Channel::receive(int timeout_ms) const {
  pollfd wait{socket_.get(), POLLIN, 0};
  int ready = 0;
  do {
    ready = ::poll(&wait, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR && timeout_ms < 0);
  if (ready == 0 || (ready < 0 && errno == EINTR)) return std::nullopt;
  if (ready < 0) return fail(errno_error("cannot wait for another process", errno));

  Message out;
  out.bytes.resize(kMostBytes);
  iovec vector{out.bytes.data(), out.bytes.size()};
  msghdr message{};
  alignas(cmsghdr) std::array<char, kControlSize> control{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const auto got = TEMP_FAILURE_RETRY(::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC));
  if (got == 0 || (got < 0 && errno == ECONNRESET)) return gone();
  if (got < 0) return fail(errno_error("cannot receive from another process", errno));
  // Owned at once, so that none leaks on an error.
  take_descriptors(message, [&](int fd) { out.descriptors.emplace_back(fd); });
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return fail(ErrorCode::kIo, "no more files can be opened: some that were sent are lost",
                "raise the limit of open files (ulimit -n)");
  }
  if ((message.msg_flags & MSG_TRUNC) != 0) {
    return fail(ErrorCode::kInternal, "a message between two processes is too long");
  }
  out.bytes.resize(static_cast<std::size_t>(got));
  return out;
}

}  // namespace stasis
