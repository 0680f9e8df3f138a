// What a process outside of the tree shares with it other than by two ends: memory, deleted files,
// eventfds, sockets, open files. CRIU 4.2.1 dumps all of it without a word, and a restore makes it
// anew for the tree alone: what the program writes there is no longer seen outside, or the address
// of a socket is still taken.
#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <optional>

#include <fmt/format.h>

#include "abi/agent_protocol.h"
#include "base/fd.h"
#include "base/own_helpers.h"
#include "base/units.h"
#include "checkpoint/inherited_files.h"
#include "direct/mover_server.h"
#include "doctor/criu_checks.h"
#include "proc/served_files.h"
#include "proc/unix_peers.h"

namespace stasis::doctor {
namespace {

constexpr Kind kOutsideMemory{
    "outside-memory", Severity::kRed,
    "shares memory with processes outside of the tree; a restore gives it its own",
    "dump those too (the process that has started both), end them, or share a file that has a "
    "name"};
constexpr Kind kOutsideFile{
    "outside-file", Severity::kRed,
    "shares deleted files with processes outside of the tree; a restore gives it its own",
    "dump those too (the process that has started both), end them, or share a file that has a "
    "name"};
constexpr Kind kOutsideEventfd{
    "outside-eventfd", Severity::kRed,
    "shares eventfds with processes outside of the tree; a restore gives it its own",
    "dump those too (the process that has started both), or close them on one side"};
constexpr Kind kOutsideSocket{
    "outside-socket", Severity::kRed,
    "shares sockets with processes outside of the tree: those keep the addresses in use, or the "
    "connections break",
    "dump those too (the process that has started both), end them before the restore and dump "
    "with --ignore-obstacles, or close the sockets on one side"};
constexpr Kind kOutsideWaiting{
    "outside-events", Severity::kYellow,
    "shares an epoll, timerfd or inotify descriptor with processes outside of the tree; a restore "
    "gives it its own",
    "dump those too, or close it on one side"};
constexpr Kind kOutsidePlace{
    "outside-offset", Severity::kYellow,
    "shares the offset of files that it writes with processes outside of the tree; a restore gives "
    "it its own",
    "open the file with O_APPEND, or in each process by itself"};

// Of the file system and the file.
using FileKey = std::pair<dev_t, ino_t>;

struct OpenPlace {
  Pid pid;
  int descriptor = -1;
};

// As kcmp(2) orders them; nothing where it may not, or cannot, compare.
std::optional<int> kernel_order(const OpenPlace& a, const OpenPlace& b) {
  const long order =
      ::syscall(SYS_kcmp, a.pid.value, b.pid.value, KCMP_FILE, a.descriptor, b.descriptor);
  switch (order) {
    case 0:
      return 0;
    case 1:
      return -1;
    case 2:
      return 1;
    default:
      return std::nullopt;
  }
}

// Open files of one kind in the kernel's order, so that each one of outside takes few questions.
class OpenFiles {
 public:
  void add(const OpenPlace& place) {
    const auto at = find(place);
    if (at.same)
      at.same->push_back(place);
    else if (at.known)
      files_.insert(files_.begin() + at.index, {place});
  }
  const std::vector<OpenPlace>* same_as(const OpenPlace& place) { return find(place).same; }

 private:
  struct Found {
    std::ptrdiff_t index = 0;
    std::vector<OpenPlace>* same = nullptr;
    bool known = true;
  };
  Found find(const OpenPlace& place) {
    std::size_t begin = 0;
    std::size_t end = files_.size();
    while (begin < end) {
      const std::size_t middle = begin + (end - begin) / 2;
      const auto order = kernel_order(place, files_.at(middle).front());
      if (!order) return {0, nullptr, false};
      if (*order == 0) return {0, &files_.at(middle), true};
      (*order < 0 ? end : begin) = *order < 0 ? middle : middle + 1;
    }
    return {static_cast<std::ptrdiff_t>(begin), nullptr, true};
  }
  std::vector<std::vector<OpenPlace>> files_;  // each with all that the tree has of it
};

struct Nameless {
  std::vector<std::pair<Pid, std::string>> holders;  // each process, and what it calls it
  bool is_file = false;
  bool written = false;
};

bool is_written(const proc::Mapping& mapping) {
  return mapping.permissions.size() > 1 && mapping.permissions[1] == 'w';
}

bool lost_its_name(std::string_view path) { return path.ends_with(" (deleted)"); }

std::string link_of(const OpenPlace& place) {
  return fmt::format("/proc/{}/fd/{}", place.pid.value, place.descriptor);
}

// What is shared and no matter of the program: the agent's page, which every tool maps that looks
// at it; what NVIDIA's libraries keep code in; the rings of aio(7), which a fork leaves mapped and
// of no use; the tables of nscd(8), which the C library maps and opens anew.
bool is_of_a_library(std::string_view path) {
  const std::string agents = fmt::format("/memfd:{} ", direct::kAgentMemfd);
  return path.starts_with(agents) || path.starts_with("/memfd:/.nvidia") ||
         path.starts_with("/memfd:/.gl") || path.starts_with("/[aio]") ||
         path.find("/nscd/") != std::string_view::npos;
}

// Only a program that was forked has such memory of another one, and an execve(2) takes it: all who
// have it run one file.
bool is_anonymous(std::string_view path) { return path.starts_with("/dev/zero"); }

struct Described {
  unsigned flags = 0;
  std::uint64_t offset = 0;
};

Described outside_description(const OpenPlace& place) {
  Described out;
  const auto text = read_file(
      AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", place.pid.value, place.descriptor), 1U << 20);
  if (!text) return out;
  const auto number = [&](std::string_view key, int base, auto& value) {
    const std::size_t at = text->find(key);
    if (at != std::string::npos)
      std::from_chars(text->data() + at + key.size(), text->data() + text->size(), value, base);
  };
  number("pos:\t", 10, out.offset);
  number("flags:\t", 8, out.flags);
  return out;
}

class SharedSearch {
 public:
  SharedSearch(Facts& facts, const Processes& all_processes, const CriuOptions& options,
               bool simulated, Signs& out)
      : facts_(facts), options_(options), simulated_(simulated), out_(out) {
    for (const proc::ProcessInfo& info : all_processes)
      ours_.insert(info.pid.value);
    for (const proc::ProcessInfo& info : all_processes)
      learn(info.pid);
  }

  void run() {
    if (nameless_.empty() && waiting_.empty() && written_.empty() && sockets_.empty()) return;
    const auto all = facts_.procfs().all();
    if (!all) return;
    const std::set<Pid> helpers = own_helpers();
    for (const proc::ProcessInfo& info : *all) {
      // A mover whose tool was killed still has the job's memory, and ends in a moment.
      if (helpers.contains(info.pid) || ours_.contains(info.pid.value) || info.has_ended() ||
          info.comm == direct::kMoverName) {
        continue;
      }
      probe(info);
    }
    for (const auto& [key, value] : found_)
      out_.add(key.first, *key.second, value);
  }

 private:
  void learn(Pid pid) {
    if (const auto files = facts_.open_files(pid)) {
      for (const proc::OpenFile& file : *files)
        if (!facts_.is_over()) learn_file({pid, file.descriptor}, file.path);
    }
    const auto mappings = facts_.mappings(pid);
    for (std::size_t i = 0; mappings && i < mappings->size(); ++i) {
      const proc::Mapping& mapping = (*mappings)[i];
      if (!is_shared_without_name(mapping)) continue;
      const std::string called =
          is_anonymous(mapping.path)
              ? fmt::format("{} at {:x}", format_bytes(mapping.end - mapping.start), mapping.start)
              : mapping.path;
      learn_nameless(pid, {mapping.device, mapping.inode}, called, mapping.path,
                     is_written(mapping));
      if (is_anonymous(mapping.path)) programs_.insert(program_of(pid));
    }
  }

  void learn_file(const OpenPlace& place, const std::string& path) {
    constexpr int kStreams = 3;
    if (is_drivers_file(path, simulated_)) return;
    if (path.starts_with("anon_inode:")) {
      const std::string_view name = std::string_view(path).substr(11);
      if (is_waited_by(name)) waiting_[std::string(name)].add(place);
      return;
    }
    if (path.starts_with("socket:[")) {
      sockets_[path].push_back(place);
      return;
    }
    // The streams that a shell has opened are shared with it in every script.
    if (place.descriptor < kStreams || !path.starts_with('/')) return;
    const auto info = proc::known_status(link_of(place));
    if (!info || !S_ISREG(info->st_mode)) return;
    const Described how = outside_description(place);
    const bool writes = (how.flags & O_ACCMODE) != O_RDONLY;
    if (info->st_nlink == 0 && !is_of_a_library(path)) {
      learn_nameless(place.pid, {info->st_dev, info->st_ino}, path, path, writes);
      return;
    }
    if (writes && how.offset > 0 && (how.flags & O_APPEND) == 0)
      written_[{info->st_dev, info->st_ino}].add(place);
  }

  void learn_nameless(Pid pid, const FileKey& key, const std::string& called, std::string_view path,
                      bool writes) {
    has_descriptors_ |= !is_anonymous(path);
    Nameless& nameless = nameless_[key];
    nameless.is_file = !is_of_no_file(path);
    nameless.written |= writes;
    if (nameless.holders.empty() || nameless.holders.back().first != pid)
      nameless.holders.push_back({pid, called});
  }

  static bool is_waited_by(std::string_view name) {
    constexpr std::array<std::string_view, 5> kKnown = {"[eventfd]", "[eventpoll]", "[timerfd]",
                                                        "inotify", "[fanotify]"};
    return std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end();
  }

  bool is_shared_without_name(const proc::Mapping& mapping) const {
    return mapping.permissions.ends_with('s') && mapping.inode != 0 &&
           lost_its_name(mapping.path) && !mapping.path.starts_with("/SYSV") &&
           !is_of_a_library(mapping.path) && !is_drivers_file(mapping.path, simulated_);
  }

  static FileKey program_of(Pid pid) {
    const auto info = proc::known_status(fmt::format("/proc/{}/exe", pid.value));
    return info ? FileKey{info->st_dev, info->st_ino} : FileKey{};
  }

  void probe(const proc::ProcessInfo& info) {
    if (const auto files = facts_.procfs().open_files(info.pid)) {
      for (const proc::OpenFile& file : *files)
        if (!facts_.is_over()) probe_file(info, {info.pid, file.descriptor}, file.path);
    }
    // Most processes share no memory: the others' mappings are read only where some of the tree's
    // may be there.
    if (!has_descriptors_ && (programs_.empty() || !programs_.contains(program_of(info.pid))))
      return;
    (void)facts_.procfs().for_each_mapping(
        info.pid,
        [&](const proc::Mapping& mapping) {
          if (is_shared_without_name(mapping))
            note_nameless(info, {mapping.device, mapping.inode}, is_written(mapping));
          return true;
        },
        proc::ProcFs::Which::kOfFiles);
  }

  void probe_file(const proc::ProcessInfo& info, const OpenPlace& place, const std::string& path) {
    if (path.starts_with("anon_inode:")) {
      const auto it = waiting_.find(path.substr(11));
      if (it == waiting_.end()) return;
      if (const auto* same = it->second.same_as(place)) {
        const Kind& kind = it->first == "[eventfd]" ? kOutsideEventfd : kOutsideWaiting;
        for (const OpenPlace& ours : *same)
          note(info, ours, kind, it->first);
      }
    } else if (path.starts_with("socket:[")) {
      if (const auto it = sockets_.find(path); it != sockets_.end()) probe_socket(info, it->second);
    } else if (path.starts_with('/')) {
      if (!lost_its_name(path) && written_.empty()) return;
      const auto status = proc::known_status(link_of(place));
      if (!status || !S_ISREG(status->st_mode)) return;
      const FileKey key{status->st_dev, status->st_ino};
      if (nameless_.contains(key)) {
        // By O_PATH nothing is read or written. Other checks of this process look at files so, too.
        const unsigned flags = outside_description(place).flags;
        if ((flags & O_PATH) == 0) note_nameless(info, key, (flags & O_ACCMODE) != O_RDONLY);
      }
      const auto it = written_.find(key);
      if (it == written_.end()) return;
      if (const auto* same = it->second.same_as(place)) {
        for (const OpenPlace& ours : *same)
          note(info, ours, kOutsidePlace, path);
      }
    }
  }

  // What only is read is the same in two places.
  void note_nameless(const proc::ProcessInfo& info, const FileKey& key, bool writes) {
    const auto it = nameless_.find(key);
    if (it == nameless_.end() || (!writes && !it->second.written) || is_ours(info)) return;
    for (const auto& [holder, called] : it->second.holders)
      found_.insert({{holder, it->second.is_file ? &kOutsideFile : &kOutsideMemory},
                     fmt::format("{} (process {}, {})", called, info.pid.value, info.comm)});
  }

  void probe_socket(const proc::ProcessInfo& info, const std::vector<OpenPlace>& holders) {
    for (const OpenPlace& ours : holders) {
      if (const auto what = why_not_shared(ours)) note(info, ours, kOutsideSocket, *what);
    }
  }

  // What a socket is that two processes must not have after a restore; nothing if that does not
  // matter, or is said by another kind.
  std::optional<std::string> why_not_shared(const OpenPlace& place) {
    const auto info = proc::known_status(link_of(place));
    if (!info) return std::nullopt;
    const Network& network = network_of(place.pid);
    const std::uint64_t inode = info->st_ino;
    if (const auto it = network.tcp.find(inode); it != network.tcp.end()) {
      if (it->second.listens) return fmt::format("TCP port {}", it->second.local_port);
      if (!options_.tcp_established) return std::nullopt;
      return fmt::format("a connection of TCP port {}", it->second.local_port);
    }
    if (const auto it = network.udp.find(inode); it != network.udp.end())
      return fmt::format("UDP port {}", it->second.local_port);
    const auto it = network.unix_sockets.find(inode);
    if (it == network.unix_sockets.end()) return std::nullopt;
    const bool has_name = !it->second.path.empty();
    const bool connected =
        !facts_.has_our_namespace(place.pid, "net") || network.connected.contains(inode);
    if (!it->second.listens && (!has_name || connected)) return std::nullopt;
    return has_name ? it->second.path : "a unix socket";
  }

  void note(const proc::ProcessInfo& info, const OpenPlace& ours, const Kind& kind,
            std::string_view what) {
    if (is_ours(info)) return;
    found_.insert({{ours.pid, &kind},
                   fmt::format("{} (descriptor {}; process {}, {})", what, ours.descriptor,
                               info.pid.value, info.comm)});
  }

  bool is_ours(const proc::ProcessInfo& info) const {
    return descends_from(facts_.procfs(), ours_, info);
  }

  struct Network {
    std::map<std::uint64_t, proc::InetSocket> tcp;
    std::map<std::uint64_t, proc::InetSocket> udp;
    std::map<std::uint64_t, proc::UnixSocket> unix_sockets;
    std::set<std::uint64_t> connected;  // of them, of our namespace
  };

  const Network& network_of(Pid pid) {
    const auto [it, is_new] = networks_.try_emplace(facts_.namespace_of(pid, "net"));
    if (!is_new) return it->second;
    Network& network = it->second;
    if (const auto sockets = facts_.procfs().tcp_sockets(pid)) {
      for (const proc::InetSocket& socket : *sockets)
        network.tcp.insert({socket.inode, socket});
    }
    if (const auto sockets = facts_.procfs().udp_sockets(pid)) {
      for (const proc::InetSocket& socket : *sockets)
        network.udp.insert({socket.inode, socket});
    }
    if (const auto sockets = facts_.procfs().unix_sockets(pid)) {
      for (const proc::UnixSocket& socket : *sockets)
        network.unix_sockets.insert({socket.inode, socket});
    }
    if (const auto peers = proc::unix_peers()) {
      for (const auto& [inode, peer] : *peers)
        network.connected.insert(inode);
    }
    return network;
  }

  Facts& facts_;
  const CriuOptions& options_;
  bool simulated_;
  Signs& out_;
  std::set<int> ours_;
  std::map<FileKey, Nameless> nameless_;
  bool has_descriptors_ = false;  // some of it, by which others may have mapped it
  std::set<FileKey> programs_;    // of those that have memory without a name
  std::map<std::string, OpenFiles, std::less<>> waiting_;
  std::map<FileKey, OpenFiles> written_;
  std::map<std::string, std::vector<OpenPlace>, std::less<>> sockets_;
  std::map<ino_t, Network> networks_;
  std::set<std::pair<std::pair<Pid, const Kind*>, std::string>> found_;
};

}  // namespace

void probe_shared(Facts& facts, const Processes& all_processes, const CriuOptions& options,
                  bool simulated, Signs& out) {
  SharedSearch(facts, all_processes, options, simulated, out).run();
}

}  // namespace stasis::doctor
