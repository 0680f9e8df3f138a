// Names of unix sockets that a restore by CRIU 4.2.1 does not give back: it binds a socket by the
// name by which the program had bound it, makes that name anew where it is gone, and removes it
// again. One that was renamed since is reached by neither.
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <set>
#include <string>

#include <fmt/format.h>

#include "doctor/criu_checks.h"
#include "proc/served_files.h"
#include "proc/unix_peers.h"

namespace stasis::doctor {
namespace {

constexpr Kind kLongName{"socket-name", Severity::kRed,
                         "has unix sockets bound by a name that is too long for CRIU to restore: "
                         "more than 103 bytes where it is gone, or 108",
                         "bind them by a shorter one"};
constexpr Kind kRenamed{"renamed-socket", Severity::kYellow,
                        "has unix sockets that were renamed, or got another name, since they were "
                        "bound; clients do not reach a restored program by the new name",
                        "let the program bind them by the name that others use, or start what "
                        "serves there anew after a restore"};

constexpr std::size_t kLongestGone = 103;  // seen; CRIU puts something behind it
constexpr std::size_t kMostNames = 10000;  // of a directory

// Not by the device: the kernel tells that of the file system, and stat(2) another one on btrfs.
bool is_that(const struct stat& info, std::uint64_t inode) {
  return S_ISSOCK(info.st_mode) && info.st_ino == inode;
}

// Its names are those that we see.
bool has_our_root(Pid pid) {
  const auto theirs = proc::known_status(fmt::format("/proc/{}/root", pid.value));
  const auto ours = proc::known_status("/");
  return theirs && ours && theirs->st_dev == ours->st_dev && theirs->st_ino == ours->st_ino;
}

// Another name of the file in the same directory; empty if it has none there.
std::string other_name(const std::string& bound, std::uint64_t inode) {
  const std::string folder = bound.substr(0, bound.rfind('/'));
  const auto names = list_open(folder.empty() ? "/" : folder);
  std::size_t seen = 0;
  while (const dirent* entry = names && ++seen < kMostNames ? ::readdir(names.get()) : nullptr) {
    struct stat info {};
    const std::string path = fmt::format("{}/{}", folder, entry->d_name);
    if (entry->d_ino == inode && path != bound && ::lstat(path.c_str(), &info) == 0 &&
        is_that(info, inode))
      return path;
  }
  return {};
}

}  // namespace

void probe_socket_names(Facts& facts, const Processes& processes, Signs& out) {
  std::map<std::uint64_t, Pid> holders;
  for (const proc::ProcessInfo& info : processes) {
    const auto files = facts.open_files(info.pid);
    if (!files || !facts.has_our_namespace(info.pid, "net")) continue;
    for (const std::uint64_t inode : proc::socket_inodes(*files))
      holders.try_emplace(inode, info.pid);
  }
  if (holders.empty()) return;
  const auto sockets = facts.procfs().unix_sockets(processes.front().pid);
  if (!sockets) return;
  std::optional<std::map<std::uint64_t, std::uint64_t>> names;
  for (const proc::UnixSocket& socket : *sockets) {
    const auto holder = holders.find(socket.inode);
    if (holder == holders.end() || !socket.path.starts_with('/') || facts.is_over()) continue;
    const Pid pid = holder->second;
    if (!facts.has_our_namespace(pid, "mnt") || !has_our_root(pid) ||
        !proc::is_on_this_machine(socket.path) ||
        proc::leads_over_served(Pid{::getpid()}, socket.path))
      continue;
    if (socket.path.size() >= sizeof(sockaddr_un::sun_path)) {
      out.add(pid, kLongName, socket.path);
      continue;
    }
    if (!names) names = proc::unix_names().value_or(std::map<std::uint64_t, std::uint64_t>());
    const auto name = names->find(socket.inode);
    if (name == names->end()) continue;
    struct stat info {};
    const bool has_one = ::lstat(socket.path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
    const bool has_it = has_one && is_that(info, name->second);
    if (has_it && info.st_nlink < 2) continue;
    if (!has_one && socket.path.size() > kLongestGone) out.add(pid, kLongName, socket.path);
    const auto other = other_name(socket.path, name->second);
    if (!other.empty()) out.add(pid, kRenamed, fmt::format("{}, bound as {}", other, socket.path));
  }
}

}  // namespace stasis::doctor
