#include "operations/socket_state.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/net_tstamp.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <map>
#include <set>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "abi/agent_protocol.h"
#include "base/fd.h"
#include "base/listing.h"
#include "criu/criu_sockets.h"
#include "image/manifest_format.h"
#include "proc/multicast.h"
#include "proc/procfs.h"
#include "proc/socket_options.h"
#include "proc/unix_peers.h"

namespace stasis {
namespace {

using manifest_format::kMaxAddresses;
using manifest_format::kMaxLost;
using manifest_format::kMaxSockets;

// So many bytes of the manifest, which may have 64 MiB, are for sockets: a program may have a
// million of them, and no image may fail for that.
constexpr std::size_t kMostBytes = 8U << 20;
constexpr std::size_t kAroundOption = 32;
constexpr std::size_t kAroundSocket = 256;
// A socket may be a member of 20 groups (igmp_max_memberships), and each has to be asked about each
// group of its network; some 0.3 us a question.
constexpr std::size_t kMostGroups = 4096;
constexpr std::size_t kMostQuestions = 1U << 20;

class Lost {
 public:
  explicit Lost(std::vector<std::string>& out) : out_(out) {}
  void add(std::string what) {
    if (out_.size() + 1 < kMaxLost) {
      out_.push_back(std::move(what));
    } else if (++more_ == 1) {
      out_.emplace_back();
    }
    if (more_ > 0) out_.back() = fmt::format("and {} more", more_);
  }
  void add(Pid pid, int descriptor, const std::string& what) {
    add(fmt::format("process {} (descriptor {}): {}", pid.value, descriptor, what));
  }

 private:
  std::vector<std::string>& out_;
  std::size_t more_ = 0;
};

UniqueFd take_descriptor(const Pidfd& process, int descriptor) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_getfd, process.fd(), descriptor, 0)));
}

ino_t network_of(Pid pid) {
  struct stat info {};
  return ::stat(fmt::format("/proc/{}/ns/net", pid.value).c_str(), &info) == 0 ? info.st_ino : 0;
}

bool is_inet(const proc::SocketKind& kind) {
  return kind.domain == AF_INET || kind.domain == AF_INET6;
}

// That the socket is bound to; nothing for loopback, "any", and addresses of one link. CRIU 4.2.1
// binds before it sets IP_FREEBIND and IP_TRANSPARENT, so theirs must be there as well.
std::optional<std::string> needed_address(const UniqueFd& socket) {
  sockaddr_storage name{};
  socklen_t size = sizeof name;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0)
    return std::nullopt;
  in_addr four{};
  if (name.ss_family == AF_INET) {
    four = reinterpret_cast<const sockaddr_in*>(&name)->sin_addr;
  } else if (name.ss_family == AF_INET6) {
    const in6_addr& six = reinterpret_cast<const sockaddr_in6*>(&name)->sin6_addr;
    if (!IN6_IS_ADDR_V4MAPPED(&six)) {
      if (IN6_IS_ADDR_UNSPECIFIED(&six) || IN6_IS_ADDR_LOOPBACK(&six) ||
          IN6_IS_ADDR_LINKLOCAL(&six) || IN6_IS_ADDR_MULTICAST(&six))
        return std::nullopt;
      std::array<char, INET6_ADDRSTRLEN> text{};
      return ::inet_ntop(AF_INET6, &six, text.data(), text.size());
    }
    std::copy_n(&six.s6_addr[12], sizeof four, reinterpret_cast<unsigned char*>(&four));
  } else {
    return std::nullopt;
  }
  const std::uint32_t number = ntohl(four.s_addr);
  constexpr std::uint32_t kLoopback = 127;
  if (number == INADDR_ANY || number == INADDR_BROADCAST || number >> 24 == kLoopback ||
      IN_MULTICAST(number))
    return std::nullopt;
  std::array<char, INET_ADDRSTRLEN> text{};
  return ::inet_ntop(AF_INET, &four, text.data(), text.size());
}

// What a question for a number of bytes (ioctl) is answered; 0 for none.
int bytes_by(const UniqueFd& file, unsigned long question) {
  int bytes = 0;
  return ::ioctl(file.get(), question, &bytes) == 0 ? bytes : 0;
}

// To what a unix socket is bound, or connected to; an abstract name begins with "@".
std::string name_of(const UniqueFd& socket) {
  for (auto* const ask : {&::getsockname, &::getpeername}) {
    sockaddr_un name{};
    socklen_t size = sizeof name;
    constexpr socklen_t kNone = offsetof(sockaddr_un, sun_path);
    if (ask(socket.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0 || size <= kNone)
      continue;
    std::string text(name.sun_path, std::min<std::size_t>(size - kNone, sizeof name.sun_path));
    if (text.front() == '\0') text.front() = '@';
    return text;
  }
  return {};
}

// Bytes of datagrams not yet read. Walks the queue as CRIU has done, while nothing else reads
// there; an empty message on which that has come is passed over by the kernel.
std::uint64_t bytes_of_datagrams(const UniqueFd& socket) {
  int before = -1;
  socklen_t size = sizeof before;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, &size) != 0) return 0;
  constexpr int kMostMessages = 100000;
  constexpr int kMostOffset = 1 << 30;
  int offset = 0;
  for (int i = 0; i < kMostMessages && offset < kMostOffset; ++i) {
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset) != 0) break;
    char none = 0;
    const ssize_t length = ::recv(socket.get(), &none, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
    if (length < 0) break;
    offset += static_cast<int>(length);
  }
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_PEEK_OFF, &before, sizeof before);
  return static_cast<std::uint64_t>(offset);
}

bool has_urgent_byte(const UniqueFd& socket) {
  char byte = 0;
  return ::recv(socket.get(), &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT) == 1;
}

bool is_connection(const UniqueFd& socket, const proc::SocketKind& kind) {
  if (kind.type != SOCK_STREAM) return false;
  std::array<unsigned char, 8> info{};  // the first byte is the state
  socklen_t size = info.size();
  return ::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, info.data(), &size) == 0 && size > 0 &&
         info[0] != TCP_CLOSE && info[0] != TCP_LISTEN;
}

// A protocol above TCP, such as the kernel's TLS, of which CRIU knows nothing.
std::string upper_protocol(const UniqueFd& socket, const proc::SocketKind& kind) {
  std::array<char, 16> name{};
  socklen_t size = name.size() - 1;
  if (kind.type != SOCK_STREAM || !is_inet(kind) ||
      ::getsockopt(socket.get(), IPPROTO_TCP, TCP_ULP, name.data(), &size) != 0)
    return {};
  return name.data();
}

class Noter {
 public:
  Noter(const Environment& env, const UniqueFd& criu_dir, Manifest& manifest,
        std::vector<std::string>& lost)
      : env_(env), criu_dir_(criu_dir), record_(manifest.sockets.emplace()), lost_(record_.lost) {
    for (std::string& what : lost)
      lost_.add(std::move(what));
  }

  // kBusy: see note_sockets().
  const std::optional<Error>& torn() const { return torn_; }

  Result<void> probe(ProcessRecord& process) {
    const auto info = procfs_.process(process.pid);
    if (!info || info->has_ended()) return {};
    const auto files = procfs_.open_files(process.pid);
    auto pidfd = Pidfd::open(process.pid);
    if (!files || !pidfd) {
      lost_.add(fmt::format("process {}: its sockets could not be looked at", process.pid.value));
      return {};
    }
    for (const proc::OpenFile& file : *files) {
      STASIS_TRY(env_.interrupt.check());
      // A name that begins with no slash is the kernel's own. Of other files no descriptor is
      // taken: to close one may wait for a file system that the program serves.
      if (file.path.starts_with("socket:[")) {
        probe_socket(process, *pidfd, file);
      } else if (file.path == "anon_inode:inotify" || file.path == "anon_inode:[fanotify]") {
        probe_events(process.pid, *pidfd, file);
      } else if (file.path == "anon_inode:[eventfd]") {
        probe_counter(process.pid, file);
      }
    }
    return {};
  }

  void finish() {
    for (const auto& [name, listener] : listeners_) {
      if (listener.maker_is_there) continue;
      lost_.add(listener.pid, listener.descriptor,
                "the user and process that its peers see as its maker (SO_PEERCRED)");
    }
    if (with_peers_ > 0)
      lost_.add(
          fmt::format("the peer credentials of {} connected unix sockets (SO_PEERCRED): they name "
                      "the user who restores, and one of the two processes, and getpeername() "
                      "has no name",
                      with_peers_));
    record_.addresses.assign(addresses_.begin(), addresses_.end());
    record_.connection_addresses.assign(connections_.begin(), connections_.end());
    if (not_noted_ > 0)
      lost_.add(fmt::format("options and multicast groups of {} sockets: there are too many",
                            not_noted_));
  }

 private:
  // A unix socket that listens, and of whose maker those who connect see other credentials than
  // what we have: after CRIU's restore they would see the user's who restores.
  struct Listener {
    Pid pid;  // that has it
    int descriptor;
    int backlog;
    ucred maker;
    bool maker_is_there;
  };

  void probe_socket(ProcessRecord& process, const Pidfd& pidfd, const proc::OpenFile& file) {
    if (seen_.insert(file.path).second) probe_new_socket(process.pid, pidfd, file);
    const auto listener = listeners_.find(file.path);
    if (listener == listeners_.end() || listener->second.maker_is_there) return;
    const auto uids = procfs_.details(process.pid);
    if (listener->second.maker.pid != process.pid.value || !uids ||
        listener->second.maker.uid != uids->uid)
      return;
    if (!process.kernel_state) process.kernel_state.emplace();
    auto& listeners = process.kernel_state->own.listeners;
    if (listeners.size() == manifest_format::kMaxListeners) return;
    listener->second.maker_is_there = true;
    listeners.push_back({file.descriptor, listener->second.backlog});
  }

  void note_credentials(Pid pid, const UniqueFd& socket, const proc::OpenFile& file) {
    ucred other{};
    socklen_t size = sizeof other;
    int listens = 0;
    socklen_t length = sizeof listens;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) != 0 ||
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 ||
        other.pid == 0)
      return;
    const bool ours = other.uid == ::geteuid() && other.gid == ::getegid();
    if (ours && listens != 0) return;
    const std::string name = name_of(socket);
    // CRIU makes both ends in one process, as socketpair(2) does: ends of that have no name.
    if (ours && name.empty()) return;
    // Agents ask each other only when they connect.
    if (listens == 0 && name.starts_with(std::string("@") + direct::kShareSocket)) return;
    if (listens == 0) {
      ++with_peers_;
      return;
    }
    if (!backlogs_)
      backlogs_ = proc::unix_backlogs().value_or(std::map<std::uint64_t, std::uint32_t>());
    struct stat info {};
    const bool known = ::fstat(socket.get(), &info) == 0 && backlogs_->contains(info.st_ino);
    const auto backlog =
        known ? static_cast<int>(std::min<std::uint32_t>(backlogs_->at(info.st_ino), INT_MAX))
              : SOMAXCONN;
    listeners_.emplace(file.path, Listener{pid, file.descriptor, backlog, other, false});
  }

  void probe_new_socket(Pid pid, const Pidfd& process, const proc::OpenFile& file) {
    if (seen_.size() > kMaxSockets || bytes_ > kMostBytes) {
      ++not_noted_;
      return;
    }
    const UniqueFd socket = take_descriptor(process, file.descriptor);
    if (!socket.valid()) {
      lost_.add(pid, file.descriptor,
                fmt::format("the socket's options ({})", std::generic_category().message(errno)));
      return;
    }
    const auto kind = proc::socket_kind(socket);
    if (!kind) return;
    SocketRecord record{pid, file.descriptor, kind->domain, kind->type, kind->protocol, {}, {}};
    for (proc::SocketOption& option : options_.changed(socket, *kind)) {
      bytes_ += kAroundOption + 2 * option.value.size();
      record.options.push_back({option.level, option.name, std::move(option.value)});
    }
    note_memberships(socket, *kind, record);
    note_address(socket, *kind, pid);
    note_unread(socket, *kind, pid, file);
    if (kind->domain == AF_UNIX) note_credentials(pid, socket, file);
    if (record.options.empty() && record.memberships.empty()) return;
    bytes_ += kAroundSocket;
    record_.sockets.push_back(std::move(record));
  }

  void note_memberships(const UniqueFd& socket, const proc::SocketKind& kind,
                        SocketRecord& record) {
    if (!proc::joins_groups(kind)) return;
    const auto [groups, is_new] = groups_.try_emplace(network_of(record.pid));
    if (is_new) groups->second = proc::multicast_groups(record.pid, kMostGroups);
    if (groups->second.size() == kMostGroups || questions_ > kMostQuestions) {
      lost_.add(record.pid, record.descriptor, "multicast groups: there are too many");
      return;
    }
    questions_ += groups->second.size();
    for (const proc::MulticastGroup& group : groups->second) {
      auto found = proc::membership(socket, kind, group);
      if (!found || record.memberships.size() == manifest_format::kMaxMemberships) continue;
      bytes_ += kAroundSocket * (1 + found->sources.size() / 4);
      record.memberships.push_back({std::move(found->interface), std::move(found->group),
                                    found->include, std::move(found->sources)});
    }
  }

  // A network of the processes' own comes back with its addresses.
  void note_address(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid) {
    if (!is_inet(kind) || network_of(pid) != own_network_) return;
    std::set<std::string>& list = is_connection(socket, kind) ? connections_ : addresses_;
    if (list.size() == kMaxAddresses) return;
    if (auto address = needed_address(socket)) list.insert(std::move(*address));
  }

  // Seen with CRIU 4.2.1, which keeps what is unread in unix sockets.
  void note_unread(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                   const proc::OpenFile& file) {
    const int descriptor = file.descriptor;
    if (is_inet(kind) && is_connection(socket, kind)) note_tcp(socket, pid, file);
    if (kind.domain == AF_UNIX) note_unix(socket, kind, pid, file);
    const bool datagrams = (is_inet(kind) && kind.type != SOCK_STREAM) || kind.domain == AF_PACKET;
    if (datagrams && proc::has_input(socket)) lost_.add(pid, descriptor, "datagrams not yet read");
    const bool is_tcp = is_inet(kind) && kind.type == SOCK_STREAM;
    if ((datagrams || is_tcp) && proc::has_error(socket))
      lost_.add(pid, descriptor, "an error of the socket not yet read");
    if (is_inet(kind) && kind.type == SOCK_DGRAM && bytes_by(socket, SIOCOUTQ) > 0)
      lost_.add(pid, descriptor, "the beginning of a datagram not yet sent (MSG_MORE, UDP_CORK)");
    if (kind.type == SOCK_STREAM && has_urgent_byte(socket))
      lost_.add(pid, descriptor, "that a byte not yet read is urgent (MSG_OOB)");
    if (const std::string protocol = upper_protocol(socket, kind); !protocol.empty())
      lost_.add(pid, descriptor, fmt::format("the socket's protocol above TCP ({})", protocol));
  }

  // An urgent byte ends what one call reads, also where it has been read itself: CRIU takes what is
  // in front of it for all. The kernel's table counts all.
  void note_tcp(const UniqueFd& socket, Pid pid, const proc::OpenFile& file) {
    int on = 0;
    socklen_t size = sizeof on;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ZEROCOPY, &on, &size) == 0 && on != 0)
      lost_.add(pid, file.descriptor,
                "the numbers of MSG_ZEROCOPY's completions, which begin at 0");
    size = sizeof on;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_TIMESTAMPING, &on, &size) == 0 &&
        (on & SOF_TIMESTAMPING_OPT_ID) != 0)
      lost_.add(pid, file.descriptor, "the numbers of time stamps (OPT_ID), which begin at 0");
    if (!proc::has_input(socket)) return;
    const auto [table, is_new] = unread_tcp_.try_emplace(network_of(pid));
    if (is_new) {
      const auto sockets = procfs_.tcp_sockets(pid);
      for (const proc::InetSocket& one : sockets ? *sockets : std::vector<proc::InetSocket>())
        if (one.unread > 0)
          table->second.emplace(fmt::format("socket:[{}]", one.inode), one.unread);
    }
    const auto unread = table->second.find(file.path);
    // The end of the stream counts as a byte.
    if (unread != table->second.end() &&
        unread->second > static_cast<std::uint64_t>(bytes_by(socket, SIOCINQ)) + 1)
      tear(pid, file.descriptor, "data behind an urgent byte (MSG_OOB) of a TCP connection");
  }

  void note_unix(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                 const proc::OpenFile& file) {
    if (!proc::has_input(socket)) return;
    if (kind.type != SOCK_STREAM) return note_messages(socket, kind, pid, file);
    const auto text =
        read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, file.descriptor));
    if (text && text->find("scm_fds: ") != std::string::npos &&
        text->find("scm_fds: 0\n") == std::string::npos)
      lost_.add(pid, file.descriptor,
                "with which bytes descriptors under way (SCM_RIGHTS) come: they may come with "
                "earlier ones");
  }

  // CRIU takes an empty message for the end of the queue.
  void note_messages(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                     const proc::OpenFile& file) {
    if (!saved_) saved_ = saved_in_unix_sockets(criu_dir_);
    struct stat info {};
    const auto saved =
        ::fstat(socket.get(), &info) == 0 ? saved_->find(info.st_ino) : saved_->end();
    if (saved == saved_->end()) return;
    const std::uint64_t unread = kind.type == SOCK_DGRAM
                                     ? bytes_of_datagrams(socket)
                                     : static_cast<std::uint64_t>(bytes_by(socket, SIOCINQ));
    if (unread > saved->second)
      tear(pid, file.descriptor, "what is behind an empty message in a unix socket");
  }

  void tear(Pid pid, int descriptor, const std::string& what) {
    lost_.add(pid, descriptor, what);
    if (torn_) return;
    torn_ = Error{ErrorCode::kBusy,
                  fmt::format("process {} (descriptor {}) has not yet read {}, which CRIU cannot "
                              "save",
                              pid.value, descriptor, what),
                  "dump it again when the program has read it",
                  {},
                  {}};
  }

  void probe_events(Pid pid, const Pidfd& process, const proc::OpenFile& file) {
    const UniqueFd events = take_descriptor(process, file.descriptor);
    if (events.valid() && proc::has_input(events))
      lost_.add(pid, file.descriptor, "events of watched files not yet read");
  }

  void probe_counter(Pid pid, const proc::OpenFile& file) {
    const auto text =
        read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, file.descriptor));
    if (text && text->find("eventfd-semaphore: 1\n") != std::string::npos)
      lost_.add(pid, file.descriptor,
                "that the eventfd is a semaphore (EFD_SEMAPHORE): a read takes all of it");
  }

  const Environment& env_;
  const UniqueFd& criu_dir_;
  SocketsRecord& record_;
  Lost lost_;
  proc::ProcFs procfs_;
  proc::SocketOptions options_;
  const ino_t own_network_ = network_of(Pid{::getpid()});
  std::map<ino_t, std::vector<proc::MulticastGroup>> groups_;
  std::set<std::string> seen_;  // "socket:[1234]"
  std::set<std::string> addresses_;
  std::set<std::string> connections_;
  std::size_t bytes_ = 0;
  std::size_t questions_ = 0;
  std::size_t not_noted_ = 0;
  std::map<std::string, Listener> listeners_;  // by "socket:[1234]"
  std::optional<std::map<std::uint64_t, std::uint32_t>> backlogs_;
  std::size_t with_peers_ = 0;
  std::map<ino_t, std::map<std::string, std::uint64_t>> unread_tcp_;  // bytes, by "socket:[1234]"
  std::optional<std::map<std::uint64_t, std::uint64_t>> saved_;       // bytes, by inode number
  std::optional<Error> torn_;
};

void put_back(const SocketRecord& record, const Process& process, Lost& lost) {
  const UniqueFd socket = take_descriptor(process.pidfd(), record.descriptor);
  if (!socket.valid()) {
    lost.add(record.pid, record.descriptor,
             fmt::format("the socket's options ({})", std::generic_category().message(errno)));
    return;
  }
  const auto kind = proc::socket_kind(socket);
  proc::SocketKind wanted_kind{record.domain, record.type, record.protocol};
  // CRIU makes each netlink socket a SOCK_RAW, which is the same to the kernel.
  if (kind && kind->domain == AF_NETLINK) wanted_kind.type = kind->type;
  if (kind != wanted_kind) {
    lost.add(record.pid, record.descriptor, "the socket's options: it is another kind of file");
    return;
  }
  std::vector<proc::SocketOption> options;
  for (const SocketOptionRecord& option : record.options)
    options.push_back({option.level, option.name, option.value});
  for (std::string& failed : proc::SocketOptions::set(socket, *kind, options))
    lost.add(record.pid, record.descriptor, failed);
  for (const MulticastRecord& wanted : record.memberships) {
    const int why =
        proc::join(socket, *kind, {wanted.interface, wanted.group, wanted.include, wanted.sources});
    if (why == 0) continue;
    lost.add(record.pid, record.descriptor,
             fmt::format("multicast group {} on {}: {}", wanted.group, wanted.interface,
                         std::generic_category().message(why)));
  }
}

}  // namespace

Result<void> note_sockets(const Environment& env, const UniqueFd& criu_dir, Manifest& manifest,
                          std::vector<std::string>& lost, bool ignore_undumpable) {
  Noter noter(env, criu_dir, manifest, lost);
  for (ProcessRecord& process : manifest.processes) {
    STASIS_TRY(noter.probe(process));
  }
  if (noter.torn() && !ignore_undumpable) return fail(*noter.torn());
  noter.finish();
  return {};
}

std::vector<std::string> put_sockets_back(const Manifest& manifest,
                                          const std::vector<std::optional<Process>>& processes) {
  std::vector<std::string> out;
  if (!manifest.sockets) return out;
  Lost lost(out);
  std::map<Pid, const Process*> by_number;
  for (const auto& process : processes)
    if (process) by_number.emplace(process->pid(), &*process);
  for (const SocketRecord& record : manifest.sockets->sockets) {
    const auto process = by_number.find(record.pid);
    if (process != by_number.end()) put_back(record, *process->second, lost);
  }
  return out;
}

void tell_of_lost(const Environment& env, const std::vector<std::string>& lost,
                  const std::string& what) {
  if (!lost.empty()) env.tell(fmt::format("{}: {}", what, listed(lost)));
}

}  // namespace stasis
