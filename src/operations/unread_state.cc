#include "operations/unread_state.h"

#include <fcntl.h>
#include <linux/net_tstamp.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <set>

#include <fmt/format.h>

#include "criu/criu_sockets.h"
#include "proc/nameless_files.h"
#include "proc/under_way.h"

namespace stasis {
namespace {

// What a question for a number of bytes (ioctl) is answered; 0 for none.
int bytes_by(const UniqueFd& file, unsigned long question) {
  int bytes = 0;
  return ::ioctl(file.get(), question, &bytes) == 0 ? bytes : 0;
}

struct Datagrams {
  std::uint64_t bytes = 0;
  bool any_has_name = false;  // its sender
};

// Those not yet read. Walks the queue as CRIU has done, while nothing else reads there; an empty
// message on which that has come is passed over by the kernel.
Datagrams unread_datagrams(const UniqueFd& socket) {
  Datagrams out;
  int before = -1;
  socklen_t size = sizeof before;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, &size) != 0) return out;
  constexpr int kMostMessages = 100000;
  constexpr int kMostOffset = 1 << 30;
  int offset = 0;
  for (int i = 0; i < kMostMessages && offset < kMostOffset; ++i) {
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset) != 0) break;
    char none = 0;
    sockaddr_un name{};
    size = sizeof name;
    const ssize_t length = ::recvfrom(socket.get(), &none, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT,
                                      reinterpret_cast<sockaddr*>(&name), &size);
    if (length < 0) break;
    offset += static_cast<int>(length);
    if (size > offsetof(sockaddr_un, sun_path)) out.any_has_name = true;
  }
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, sizeof before);
  out.bytes = static_cast<std::uint64_t>(offset);
  return out;
}

// Of datagrams, and of SOCK_SEQPACKET unless the other end is shut.
bool starts_with_empty(const UniqueFd& socket) {
  pollfd end{socket.get(), POLLRDHUP, 0};
  if (::poll(&end, 1, 0) != 0) return false;
  int before = -1;
  socklen_t size = sizeof before;
  constexpr int kOff = -1;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, &size) != 0 ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &kOff, sizeof kOff) != 0)
    return false;
  char none = 0;
  const ssize_t length = ::recv(socket.get(), &none, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, sizeof before);
  return length == 0;
}

// Not yet read from an urgent byte on, with that byte; 0 where none is ahead. The kernel counts
// past it where urgent data is in line (tcp_ioctl()), as it is for a moment here. Where it is so
// always CRIU fails at the byte.
int bytes_behind_mark(const UniqueFd& socket) {
  int in_line = 0;
  socklen_t size = sizeof in_line;
  if (!proc::has_input(socket) ||
      ::getsockopt(socket.get(), SOL_SOCKET, SO_OOBINLINE, &in_line, &size) != 0 || in_line != 0)
    return 0;
  const int before = bytes_by(socket, SIOCINQ);
  constexpr int kInLine = 1;
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_OOBINLINE, &kInLine, sizeof kInLine);
  const int all = bytes_by(socket, SIOCINQ);
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_OOBINLINE, &in_line, sizeof in_line);
  return all - before;
}

bool has_peer(const UniqueFd& socket) {
  sockaddr_un name{};
  socklen_t size = sizeof name;
  return ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&name), &size) == 0;
}

// Whether processes besides the peer can send there.
bool is_open_to_others(const UniqueFd& socket) {
  sockaddr_un name{};
  socklen_t size = sizeof name;
  return !has_peer(socket) &&
         (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0 ||
          size > offsetof(sockaddr_un, sun_path));
}

bool has_urgent_byte(const UniqueFd& socket) {
  char byte = 0;
  return ::recv(socket.get(), &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT) == 1;
}

// A protocol above TCP, such as the kernel's TLS, of which CRIU knows nothing.
std::string upper_protocol(const UniqueFd& socket, const proc::SocketKind& kind) {
  std::array<char, 16> name{};
  socklen_t size = name.size() - 1;
  if (kind.type != SOCK_STREAM || !kind.is_inet() ||
      ::getsockopt(socket.get(), IPPROTO_TCP, TCP_ULP, name.data(), &size) != 0)
    return {};
  return name.data();
}

}  // namespace

// Seen with CRIU 4.2.1, which keeps what is unread in unix sockets.
void UnreadState::note(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                       const proc::OpenFile& file) {
  const int descriptor = file.descriptor;
  if (kind.is_inet() && proc::is_connection(socket, kind)) note_tcp(socket, pid, file);
  if (kind.domain == AF_UNIX) note_unix(socket, kind, pid, file);
  const bool datagrams = (kind.is_inet() && kind.type != SOCK_STREAM) || kind.domain == AF_PACKET;
  if (datagrams && proc::has_input(socket)) lost_.add(pid, descriptor, "datagrams not yet read");
  const bool is_tcp = kind.is_inet() && kind.type == SOCK_STREAM;
  if ((datagrams || is_tcp) && proc::has_error(socket))
    lost_.add(pid, descriptor, "an error of the socket not yet read");
  if (kind.is_inet() && kind.type == SOCK_DGRAM && bytes_by(socket, SIOCOUTQ) > 0)
    lost_.add(pid, descriptor, "the beginning of a datagram not yet sent (MSG_MORE, UDP_CORK)");
  if (kind.type == SOCK_STREAM && has_urgent_byte(socket))
    lost_.add(pid, descriptor, "an urgent byte not yet read (MSG_OOB), or that it is urgent");
  if (const std::string protocol = upper_protocol(socket, kind); !protocol.empty())
    lost_.add(pid, descriptor, fmt::format("the socket's protocol above TCP ({})", protocol));
}

// An urgent byte ends what one call reads, also where it has been read itself: CRIU takes what is
// in front of it for all.
void UnreadState::note_tcp(const UniqueFd& socket, Pid pid, const proc::OpenFile& file) {
  int on = 0;
  socklen_t size = sizeof on;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ZEROCOPY, &on, &size) == 0 && on != 0)
    lost_.add(pid, file.descriptor, "the numbers of MSG_ZEROCOPY's completions, which begin at 0");
  size = sizeof on;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_TIMESTAMPING, &on, &size) == 0 &&
      (on & SOF_TIMESTAMPING_OPT_ID) != 0)
    lost_.add(pid, file.descriptor, "the numbers of time stamps (OPT_ID), which begin at 0");
  // The kernel tells how long it is to who has no room for it, and keeps it.
  constexpr int kSavedSyn = 28;  // TCP_SAVED_SYN of linux/tcp.h
  size = 0;
  if (::getsockopt(socket.get(), IPPROTO_TCP, kSavedSyn, nullptr, &size) != 0 && size > 0)
    lost_.add(pid, file.descriptor, "the packet that has opened the connection (TCP_SAVED_SYN)");
  if (!tcp_close_ && proc::peeks_behind(socket))
    tear(pid, file.descriptor, "data of a TCP connection that it peeks at (SO_PEEK_OFF)");
  if (!tcp_close_ && bytes_behind_mark(socket) > 1)
    tear(pid, file.descriptor, "data behind an urgent byte (MSG_OOB) of a TCP connection");
}

void UnreadState::note_unix(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                            const proc::OpenFile& file) {
  if (!proc::has_input(socket)) return;
  const std::uint32_t under_way = proc::descriptors_under_way(pid, file.descriptor);
  if (under_way > 0) note_under_way(socket, kind, pid, file.descriptor, under_way);
  if (kind.type != SOCK_STREAM) return note_messages(socket, kind, pid, file);
  if (under_way > 0)
    lost_.add(pid, file.descriptor,
              "with which bytes descriptors under way (SCM_RIGHTS) come: they may come with "
              "earlier ones");
}

// CRIU opens their files anew at the restore, and sends them. `count` was there before this looks:
// more may come meanwhile.
void UnreadState::note_under_way(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                                 int descriptor, std::uint32_t count) {
  const auto found =
      is_held_up_ ? proc::UnderWay{} : proc::look_at_under_way(socket, kind.type == SOCK_STREAM);
  is_held_up_ |= found.is_held_up;
  if (!found.lost.empty())
    return tear(pid, descriptor,
                fmt::format("a descriptor under way (SCM_RIGHTS) that has {}", found.lost));
  if (!found.is_known)
    lost_.add(pid, descriptor,
              "locks, leases and owners of descriptors under way (SCM_RIGHTS), which could not be "
              "examined");
  else if (kind.type != SOCK_STREAM && found.with_bytes < count)
    tear(pid, descriptor, "a descriptor under way (SCM_RIGHTS) with an empty message");
  std::set<Pid> tree;
  for (const ProcessRecord& process : tree_)
    tree.insert(process.pid);
  // After a restore the two would no longer see what the other writes.
  if (const auto other = proc::holder_outside(found.nameless, tree))
    tear(pid, descriptor,
         fmt::format("a descriptor under way (SCM_RIGHTS) of memory or a deleted file that process "
                     "{} ({}) outside of the tree has, too",
                     other->pid.value, other->comm));
}

// CRIU takes an empty message for the end of the queue. To a socket with a name, which is connected
// with no other, messages may have come since from outside of the tree. Where a sender has a name
// it is that of the peer, if there is one: CRIU sends what it has saved from that.
void UnreadState::note_messages(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                                const proc::OpenFile& file) {
  const bool is_datagram = kind.type == SOCK_DGRAM;
  const Datagrams datagrams = is_datagram ? unread_datagrams(socket) : Datagrams{};
  if (datagrams.any_has_name && !has_peer(socket))
    lost_.add(pid, file.descriptor, "the names of the senders of messages not yet read");
  if (starts_with_empty(socket))
    return tear(pid, file.descriptor, "an empty message in a unix socket");
  if (!saved_) saved_ = saved_in_unix_sockets(criu_dir_);
  struct stat info {};
  const auto saved = ::fstat(socket.get(), &info) == 0 ? saved_->find(info.st_ino) : saved_->end();
  if (saved == saved_->end()) return;
  const std::uint64_t unread =
      is_datagram ? datagrams.bytes : static_cast<std::uint64_t>(bytes_by(socket, SIOCINQ));
  if (unread <= saved->second) return;
  if (is_open_to_others(socket))
    lost_.add(pid, file.descriptor,
              "messages in a unix socket that came while it was saved, or that are behind an empty "
              "one");
  else
    tear(pid, file.descriptor, "what is behind an empty message in a unix socket");
}

void UnreadState::tear(Pid pid, int descriptor, const std::string& what) {
  lost_.add(pid, descriptor, what);
  if (torn_) return;
  torn_ = Error{ErrorCode::kBusy,
                fmt::format("process {} (descriptor {}) has not yet read {}, which CRIU cannot "
                            "save",
                            pid.value, descriptor, what),
                "dump it again when the program has read it"};
}

}  // namespace stasis
