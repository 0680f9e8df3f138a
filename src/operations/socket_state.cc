#include "operations/socket_state.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
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
#include "base/scope_guard.h"
#include "image/manifest_format.h"
#include "operations/lost.h"
#include "operations/unread_state.h"
#include "proc/descriptors.h"
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

constexpr mode_t kAllBits = 07777;
constexpr mode_t kUsualMode = 0777;  // of a socket, as the kernel makes it

constexpr int kFreeBindSix = 78;  // IPV6_FREEBIND of linux/in6.h, Linux 4.15

UniqueFd take_descriptor(const Pidfd& process, int descriptor) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_getfd, process.fd(), descriptor, 0)));
}

// Whether the machine need not have the address to which the socket is bound. A connection needs
// it: CRIU could not connect it.
bool may_be_elsewhere(const UniqueFd& socket, const proc::SocketKind& kind) {
  const auto is_set = [&](int level, int name) {
    int value = 0;
    socklen_t size = sizeof value;
    return ::getsockopt(socket.get(), level, name, &value, &size) == 0 && value != 0;
  };
  const bool is_asked = kind.domain == AF_INET
                            ? is_set(SOL_IP, IP_FREEBIND) || is_set(SOL_IP, IP_TRANSPARENT)
                            : is_set(SOL_IPV6, kFreeBindSix) || is_set(SOL_IPV6, IPV6_TRANSPARENT);
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  return is_asked && !proc::is_connection(socket, kind) &&
         ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0;
}

// That the socket is bound to; nothing for loopback, "any", and addresses of one link.
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

class Noter {
 public:
  Noter(const Environment& env, const UniqueFd& criu_dir, Manifest& manifest,
        std::vector<std::string>& lost)
      : env_(env),
        record_(manifest.sockets.emplace()),
        lost_(record_.lost),
        unread_(criu_dir, manifest.processes, manifest.criu_options.tcp_close, lost_) {
    for (std::string& what : lost)
      lost_.add(std::move(what));
  }

  // kBusy: see note_sockets().
  const std::optional<Error>& torn() const { return unread_.torn(); }

  Result<void> probe(ProcessRecord& process) {
    const auto info = procfs_.process(process.pid);
    if (!info || info->has_ended()) return {};
    const auto files = procfs_.open_files(process.pid);
    auto pidfd = Pidfd::open(process.pid);
    if (!files || !pidfd) {
      lost_.add(fmt::format("process {}: its sockets could not be examined", process.pid.value));
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
                      "the user who restores, and one of the two processes, and getsockname() "
                      "and getpeername() have no name",
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
    UniqueFd socket = take_descriptor(process, file.descriptor);
    const ScopeGuard drop([&] { dropped_.add(std::move(socket)); });
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
    note_owner(socket, record);
    note_memberships(socket, *kind, record);
    note_address(socket, *kind, pid);
    unread_.note(socket, *kind, pid, file);
    if (kind->domain == AF_UNIX) note_credentials(pid, socket, file);
    if (kind->domain == AF_UNIX && kind->type == SOCK_DGRAM) note_dead_peer(pid, socket, file);
    if (kind->domain == AF_NETLINK) note_peer_groups(socket, record);
    if (record.options.empty() && record.memberships.empty() && !record.mode && !record.uid &&
        !record.peer_groups)
      return;
    bytes_ += kAroundSocket;
    record_.sockets.push_back(std::move(record));
  }

  // CRIU makes each as the user who restores. The owner counts, too: rules of routes and of packets
  // may be for one.
  static void note_owner(const UniqueFd& socket, SocketRecord& record) {
    struct stat info {};
    if (::fstat(socket.get(), &info) != 0) return;
    if ((info.st_mode & kAllBits) != kUsualMode) record.mode = info.st_mode & kAllBits;
    if (info.st_uid == ::geteuid() && info.st_gid == ::getegid()) return;
    record.uid = info.st_uid;
    record.gid = info.st_gid;
  }

  // CRIU leaves it without a peer.
  void note_dead_peer(Pid pid, const UniqueFd& socket, const proc::OpenFile& file) {
    sockaddr_un name{};
    socklen_t size = sizeof name;
    struct stat info {};
    if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0 ||
        ::fstat(socket.get(), &info) != 0 || proc::network_of(pid) != own_network_)
      return;
    if (!peers_) {
      auto peers = proc::unix_peers();
      if (!peers) return;
      peers_ = std::move(*peers);
    }
    if (!peers_->contains(info.st_ino))
      lost_.add(pid, file.descriptor,
                "that the peer of the unix socket is closed: send() says ENOTCONN, and not "
                "ECONNREFUSED");
  }

  // One that is connected to none comes back connected to the 32nd.
  static void note_peer_groups(const UniqueFd& socket, SocketRecord& record) {
    sockaddr_nl peer{};
    socklen_t size = sizeof peer;
    if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &size) == 0 &&
        peer.nl_groups == 0)
      record.peer_groups = 0;
  }

  void note_memberships(const UniqueFd& socket, const proc::SocketKind& kind,
                        SocketRecord& record) {
    if (!proc::joins_groups(kind)) return;
    const auto [groups, is_new] = groups_.try_emplace(proc::network_of(record.pid));
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
    if (!kind.is_inet() || proc::network_of(pid) != own_network_) return;
    if (may_be_elsewhere(socket, kind)) return;
    std::set<std::string>& list = proc::is_connection(socket, kind) ? connections_ : addresses_;
    if (list.size() == kMaxAddresses) return;
    if (auto address = needed_address(socket)) list.insert(std::move(*address));
  }

  void probe_events(Pid pid, const Pidfd& process, const proc::OpenFile& file) {
    UniqueFd events = take_descriptor(process, file.descriptor);
    const ScopeGuard drop([&] { dropped_.add(std::move(events)); });
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
  SocketsRecord& record_;
  Lost lost_;
  UnreadState unread_;
  proc::ProcFs procfs_;
  proc::DroppedCopies dropped_;
  proc::SocketOptions options_;
  const ino_t own_network_ = proc::network_of(Pid{::getpid()});
  std::map<ino_t, std::vector<proc::MulticastGroup>> groups_;
  std::set<std::string> seen_;  // "socket:[1234]"
  std::set<std::string> addresses_;
  std::set<std::string> connections_;
  std::size_t bytes_ = 0;
  std::size_t questions_ = 0;
  std::size_t not_noted_ = 0;
  std::map<std::string, Listener> listeners_;  // by "socket:[1234]"
  std::optional<std::map<std::uint64_t, std::uint32_t>> backlogs_;
  std::optional<std::map<std::uint64_t, proc::UnixPeer>> peers_;
  std::size_t with_peers_ = 0;
};

void put_owner_back(const SocketRecord& record, const UniqueFd& socket, Lost& lost) {
  struct stat info {};
  if (::fstat(socket.get(), &info) != 0) return;
  const uid_t uid = record.uid.value_or(info.st_uid);
  const gid_t gid = record.gid.value_or(info.st_gid);
  if ((uid != info.st_uid || gid != info.st_gid) && ::fchown(socket.get(), uid, gid) != 0)
    lost.add(record.pid, record.descriptor,
             fmt::format("the socket's owner ({})", std::generic_category().message(errno)));
  const mode_t mode = record.mode.value_or(info.st_mode & kAllBits);
  if (mode != (info.st_mode & kAllBits) && ::fchmod(socket.get(), mode) != 0)
    lost.add(record.pid, record.descriptor,
             fmt::format("the socket's mode ({})", std::generic_category().message(errno)));
}

void put_peer_groups_back(const SocketRecord& record, const UniqueFd& socket, Lost& lost) {
  sockaddr_nl peer{};
  socklen_t size = sizeof peer;
  if (!record.peer_groups ||
      ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
      peer.nl_groups == *record.peer_groups)
    return;
  peer.nl_family = AF_NETLINK;
  peer.nl_groups = *record.peer_groups;
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&peer), sizeof peer) != 0)
    lost.add(record.pid, record.descriptor,
             fmt::format("the groups that the netlink socket sends to ({})",
                         std::generic_category().message(errno)));
}

void put_back(const SocketRecord& record, const Process& process, proc::DroppedCopies& dropped,
              Lost& lost) {
  UniqueFd socket = take_descriptor(process.pidfd(), record.descriptor);
  const ScopeGuard drop([&] { dropped.add(std::move(socket)); });
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
  put_owner_back(record, socket, lost);
  if (kind->domain == AF_NETLINK) put_peer_groups_back(record, socket, lost);
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

bool binds_anywhere(const Manifest& manifest) {
  if (!manifest.sockets) return false;
  return std::any_of(
      manifest.sockets->sockets.begin(), manifest.sockets->sockets.end(),
      [](const SocketRecord& socket) {
        return socket.domain == AF_INET &&
               std::any_of(socket.options.begin(), socket.options.end(),
                           [](const SocketOptionRecord& option) {
                             return option.level == SOL_IP &&
                                    (option.name == IP_FREEBIND || option.name == IP_TRANSPARENT);
                           });
      });
}

std::vector<std::string> put_sockets_back(const Manifest& manifest,
                                          const std::vector<std::optional<Process>>& processes) {
  std::vector<std::string> out;
  if (!manifest.sockets) return out;
  Lost lost(out);
  std::map<Pid, const Process*> by_number;
  for (const auto& process : processes)
    if (process) by_number.emplace(process->pid(), &*process);
  proc::DroppedCopies dropped;
  for (const SocketRecord& record : manifest.sockets->sockets) {
    const auto process = by_number.find(record.pid);
    if (process != by_number.end()) put_back(record, *process->second, dropped, lost);
  }
  return out;
}

void tell_of_lost(const Environment& env, const std::vector<std::string>& lost,
                  const std::string& what) {
  if (!lost.empty()) env.tell(fmt::format("{}: {}", what, listed(lost)));
}

}  // namespace stasis
