#include "operations/part_links.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <system_error>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/scope_guard.h"
#include "group/group_part.h"
#include "proc/descriptors.h"
#include "proc/procfs.h"
#include "proc/tcp_connections.h"

namespace stasis {
namespace {

// "return 0", after a word by which it is known as ours.
constexpr std::array<sock_filter, 2> kDropAll = {sock_filter{BPF_LD | BPF_IMM, 0, 0, 0x57a5150b},
                                                 sock_filter{BPF_RET | BPF_K, 0, 0, 0}};

enum class LinkLock { kNone, kOurs, kOther };

LinkLock lock_of(const UniqueFd& socket) {
  std::array<sock_filter, kDropAll.size()> found{};
  // In instructions. EACCES: one that is no classic filter; EINVAL: longer than ours.
  socklen_t length = 0;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_GET_FILTER, nullptr, &length) != 0)
    return LinkLock::kOther;
  if (length == 0) return LinkLock::kNone;
  if (length != found.size() ||
      ::getsockopt(socket.get(), SOL_SOCKET, SO_GET_FILTER, found.data(), &length) != 0)
    return LinkLock::kOther;
  return std::memcmp(found.data(), kDropAll.data(), sizeof kDropAll) == 0 ? LinkLock::kOurs
                                                                          : LinkLock::kOther;
}

// "0100007F:1F90", as the kernel has it, as "127.0.0.1:8080". Nothing for what is no address.
std::string address_text(const std::string& kernel) {
  const std::size_t colon = kernel.find(':');
  if (colon != 8 && colon != 32) return {};
  std::array<std::uint32_t, 4> words{};
  for (std::size_t i = 0; i < colon / 8; ++i) {
    const char* begin = kernel.data() + 8 * i;
    if (std::from_chars(begin, begin + 8, words[i], 16).ptr != begin + 8) return {};
  }
  unsigned port = 0;
  std::from_chars(kernel.data() + colon + 1, kernel.data() + kernel.size(), port, 16);
  std::array<char, INET6_ADDRSTRLEN> text{};
  const bool six = colon == 32;
  if (::inet_ntop(six ? AF_INET6 : AF_INET, words.data(), text.data(), text.size()) == nullptr)
    return {};
  return six ? fmt::format("[{}]:{}", text.data(), port) : fmt::format("{}:{}", text.data(), port);
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address.starts_with("[::1]");
}

// What tells the loopback network of one machine from that of another.
std::string network_mark(Pid pid) {
  struct stat space {};
  (void)::stat(fmt::format("/proc/{}/ns/net", pid.value).c_str(), &space);
  auto boot = read_file(AT_FDCWD, "/proc/sys/kernel/random/boot_id", 64);
  return fmt::format("{}@{}", space.st_ino, boot ? boot->substr(0, 36) : "?");
}

std::string link_text(const proc::InetSocket& socket, Pid pid) {
  std::string local = address_text(socket.local);
  const std::string remote = address_text(socket.remote);
  if (local.empty() || remote.empty()) return {};
  std::string text = local + " " + remote;
  if (is_loopback(remote)) text += " " + network_mark(pid);
  return text;
}

// The connections of the tree that lead out of it, by their inodes.
struct FoundLinks {
  std::vector<proc::ProcessInfo> tree;
  std::map<std::uint64_t, std::string> texts;
  PartLinks links;
};

Result<FoundLinks> find_tree_links(Pid root) {
  const proc::ProcFs procfs;
  FoundLinks found;
  STASIS_TRY_ASSIGN(found.tree, procfs.tree(root));
  std::set<std::uint64_t> inodes;
  std::map<ino_t, Pid> networks;
  for (const proc::ProcessInfo& process : found.tree) {
    auto own = procfs.tcp_socket_inodes(process.pid);
    if (!own && (own.error().code == ErrorCode::kNoSuchProcess || process.has_ended())) continue;
    STASIS_TRY(own);
    inodes.insert(own->begin(), own->end());
    struct stat space {};
    if (!own->empty() &&
        ::stat(fmt::format("/proc/{}/ns/net", process.pid.value).c_str(), &space) == 0)
      networks.emplace(space.st_ino, process.pid);
  }
  for (const auto& [space, pid] : networks) {
    const proc::TcpTable table(procfs, pid);
    for (const proc::InetSocket& socket : table.sockets()) {
      if (socket.listens || !inodes.contains(socket.inode) || table.stays_within(socket, inodes))
        continue;
      std::string text = link_text(socket, pid);
      if (text.empty()) continue;
      (socket.is_established ? found.links.established : found.links.closing).push_back(text);
      found.texts.emplace(socket.inode, std::move(text));
    }
  }
  if (found.texts.size() > kMostPartLinks) {
    return fail(
        refusal({"tcp-connection", Severity::kRed, root,
                 fmt::format("{} TCP connections lead out of the tree below process {}, and "
                             "{} at most are kept",
                             found.texts.size(), root.value, kMostPartLinks),
                 "close some of them, or dump with --tcp-close"}));
  }
  std::sort(found.links.established.begin(), found.links.established.end());
  std::sort(found.links.closing.begin(), found.links.closing.end());
  return found;
}

// Calls `act` with each socket of the process for which `is_wanted` says so of its inode.
template <class IsWanted, class Act>
Result<void> for_each_socket(Pid pid, const IsWanted& is_wanted, const Act& act) {
  constexpr std::string_view kSocket = "socket:[";
  auto files = proc::ProcFs().open_files(pid);
  auto process = Pidfd::open(pid);
  if (!files && files.error().code == ErrorCode::kNoSuchProcess) return {};
  STASIS_TRY(files);
  if (!process) return {};
  proc::DroppedCopies dropped;
  for (const proc::OpenFile& file : *files) {
    if (!file.path.starts_with(kSocket)) continue;
    std::uint64_t inode = 0;
    std::from_chars(file.path.data() + kSocket.size(), file.path.data() + file.path.size(), inode);
    if (!is_wanted(inode)) continue;
    UniqueFd socket(
        static_cast<int>(::syscall(SYS_pidfd_getfd, process->fd(), file.descriptor, 0)));
    if (!socket.valid()) {
      if (errno == EBADF || errno == ESRCH) continue;
      return fail(errno_error(fmt::format("cannot reach a TCP connection of process {}", pid.value),
                              errno));
    }
    const ScopeGuard drop([&] { dropped.add(std::move(socket)); });
    // The program may have put another file there since.
    struct stat info {};
    if (::fstat(socket.get(), &info) != 0 || info.st_ino != inode) continue;
    STASIS_TRY(act(socket));
  }
  return {};
}

Result<void> lock_link(const UniqueFd& socket, Pid pid, const std::string& link) {
  const LinkLock before = lock_of(socket);
  if (before == LinkLock::kOurs) return {};
  const sock_fprog program{kDropAll.size(), const_cast<sock_filter*>(kDropAll.data())};
  if (before == LinkLock::kNone &&
      ::setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0)
    return {};
  const std::string why = before == LinkLock::kOther
                              ? std::string("with a filter of its own")
                              : "that cannot be locked: " + std::generic_category().message(errno);
  return fail(refusal({"tcp-connection", Severity::kRed, pid,
                       fmt::format("process {} has a TCP connection ({}) {}", pid.value, link, why),
                       "dump with --tcp-close, if the program can do without its connections"}));
}

}  // namespace

Result<PartLinks> find_links(Pid root) {
  STASIS_TRY_ASSIGN(auto found, find_tree_links(root));
  return std::move(found.links);
}

Result<PartLinks> lock_links(Pid root) {
  STASIS_TRY_ASSIGN(auto found, find_tree_links(root));
  for (const proc::ProcessInfo& process : found.tree) {
    STASIS_TRY(for_each_socket(
        process.pid, [&](std::uint64_t inode) { return found.texts.contains(inode); },
        [&](const UniqueFd& socket) {
          struct stat info {};
          (void)::fstat(socket.get(), &info);
          return lock_link(socket, process.pid, found.texts[info.st_ino]);
        }));
  }
  return std::move(found.links);
}

namespace {

// Calls `act` with each TCP socket of the processes that is locked.
template <class Act>
std::vector<std::string> for_each_locked(const std::vector<Pid>& processes, const Act& act) {
  std::vector<std::string> failed;
  const proc::ProcFs procfs;
  for (const Pid pid : processes) {
    const auto tcp = procfs.tcp_socket_inodes(pid);
    if (!tcp || tcp->empty()) continue;
    const std::set<std::uint64_t> inodes(tcp->begin(), tcp->end());
    auto done = for_each_socket(
        pid, [&](std::uint64_t inode) { return inodes.contains(inode); },
        [&](const UniqueFd& socket) -> Result<void> {
          if (lock_of(socket) != LinkLock::kOurs || act(socket)) return {};
          return fail(errno_error(
              fmt::format("a TCP connection of process {} stays locked", pid.value), errno));
        });
    if (!done) failed.push_back(done.error().message);
  }
  return failed;
}

}  // namespace

std::vector<std::string> let_links_go(const std::vector<Pid>& processes) {
  return for_each_locked(processes, [](const UniqueFd& socket) {
    const int none = 0;
    return ::setsockopt(socket.get(), SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none) == 0;
  });
}

void end_links_with_processes(const std::vector<Pid>& processes) {
  (void)for_each_locked(processes, [](const UniqueFd& socket) {
    // A reset, which the other end's lock drops. In repair mode (TCP_REPAIR) nothing would be sent,
    // but the program, which runs still, would be refused its next read.
    const linger reset{1, 0};
    (void)::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    return true;
  });
}

std::vector<std::string> mapped_links(std::vector<std::string> links,
                                      const std::vector<AddressPair>& pairs) {
  for (std::string& link : links) {
    std::string out;
    for (std::size_t begin = 0; begin < link.size();) {
      const std::size_t end = std::min(link.find(' ', begin), link.size());
      std::string word = link.substr(begin, end - begin);
      begin = end + 1;
      const std::size_t colon = word.rfind(':');
      const bool six = word.starts_with('[') && colon != std::string::npos && colon > 2;
      const std::string address =
          six ? word.substr(1, colon - 2) : word.substr(0, std::min(colon, word.size()));
      const std::string mapped = mapped_address(address, pairs);
      if (mapped != address && colon != std::string::npos)
        word = (six ? "[" + mapped + "]" : mapped) + word.substr(colon);
      out += (out.empty() ? "" : " ") + word;
    }
    link = std::move(out);
  }
  return links;
}

}  // namespace stasis
