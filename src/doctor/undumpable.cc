#include "doctor/undumpable.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"
#include "checkpoint/inherited_files.h"
#include "proc/unix_peers.h"

namespace stasis {
namespace {

struct Kind {
  std::string_view id;
  Light light;
  std::string_view what;  // after "process 12 (python) "
  std::string_view remedy;
};

constexpr Kind kIoUring{"io-uring", Light::kRed, "has an io_uring open, which CRIU cannot dump",
                        "turn io_uring off in the program (libuv: UV_USE_IO_URING=0)"};
constexpr Kind kAnonymous{"anonymous-file", Light::kRed,
                          "has files of a kind open that CRIU cannot dump",
                          "close them before the dump"};
constexpr Kind kDevice{"device", Light::kRed, "has devices open that CRIU cannot dump",
                       "close them before the dump"};
constexpr Kind kPidfd{"pidfd", Light::kRed, "holds a pidfd of a process outside of the tree",
                      "dump that process too, or close the pidfd"};
constexpr Kind kSecret{"secret-memory", Light::kRed,
                       "has memory that the kernel shows nobody (memfd_secret)",
                       "do without in the program"};
constexpr Kind kSysv{"sysv-memory", Light::kRed,
                     "has System V shared memory, and its IPC namespace is not its own",
                     "start it in one of its own: unshare --ipc"};
constexpr Kind kGhost{"deleted-file", Light::kRed,
                      "has deleted files open that are larger than --ghost-limit",
                      "give a larger --ghost-limit, or close them before the dump"};
constexpr Kind kLock{"file-lock", Light::kRed, "holds file locks", "dump with --file-locks"};
// The other files of driver 580 are in every process that is forked from one with CUDA, and CRIU
// dumps them there; but such locks are not inherited.
constexpr Kind kPosixLock{"file-lock", Light::kYellow, "holds file locks, if not the driver does",
                          "dump with --file-locks"};
constexpr Kind kTcp{"tcp-connection", Light::kRed, "has open TCP connections",
                    "dump with --tcp-established to keep them, or --tcp-close to drop them"};
constexpr Kind kUnix{
    "unix-socket", Light::kRed, "has unix sockets connected to processes outside of the tree",
    "dump those too, close the connection, name it (--external 'unix[NUMBER]'), or, "
    "if it is a named datagram socket, let it be cut with --ext-unix-sk"};
constexpr Kind kOtherUser{"other-user", Light::kRed,
                          "runs as another user, whose limits CRIU may not read",
                          "give stasis CAP_SYS_RESOURCE, or run it as that user"};
constexpr Kind kTracer{"tracer", Light::kRed, "is being traced, which nobody else can then do",
                       "detach the debugger, or wait until the other tool has ended"};
constexpr Kind kInotify{"inotify", Light::kYellow, "watches files by inotify",
                        "CRIU cannot dump a watch on /proc, or on a file system that does not "
                        "open files by handle: end such watches before the dump"};
constexpr Kind kReserved{"reserved-memory", Light::kYellow, "has much address space reserved",
                         "CRIU keeps 16 bytes for each page of it while it dumps"};

constexpr std::size_t kShown = 3;
constexpr std::uint64_t kMuchReserved = 256ULL << 30;

// Character devices that CRIU 4.2 dumps (its files.c and tty.c; numbers of the kernel's
// admin-guide/devices.txt): memory, terminals but serial ports of the 4:64 kind, autofs; a tun in a
// network namespace of its own.
bool dumps_device(unsigned major, unsigned minor, bool has_own_network) {
  constexpr unsigned kMemory = 1;
  constexpr unsigned kTty = 4;
  constexpr unsigned kTtyAux = 5;
  constexpr unsigned kMisc = 10;
  constexpr unsigned kPtyFirst = 128;  // masters, then slaves
  constexpr unsigned kPtyLast = 136;
  constexpr unsigned kUsbSerial = 188;
  constexpr unsigned kLowDenseSerial = 204;
  switch (major) {
    case kMemory:
    case kTtyAux:
    case kUsbSerial:
    case kLowDenseSerial:
      return true;
    case kTty:
      return minor < 64;
    case kMisc:
      return minor == 235 || (minor == 200 && has_own_network);
    default:
      return major >= kPtyFirst && major <= kPtyLast;
  }
}

bool dumps_anonymous(std::string_view name) {
  constexpr std::array<std::string_view, 7> kKnown = {
      "[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "[pidfd]", "[fanotify]", "bpf-map"};
  return std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end();
}

// Memory that the kernel shows under a name, though there is no file.
bool is_of_no_file(std::string_view path) {
  constexpr std::array<std::string_view, 5> kNames = {"/SYSV", "/dev/zero", "/anon_hugepage",
                                                      "/[aio]", "/memfd:"};
  return std::any_of(kNames.begin(), kNames.end(),
                     [path](std::string_view name) { return path.starts_with(name); });
}

bool is_set(const std::vector<std::string>& external, std::string_view kind) {
  return std::any_of(external.begin(), external.end(),
                     [kind](const std::string& one) { return one.starts_with(kind); });
}

bool may_read_limits(const proc::ProcFs& procfs) {
  const auto capabilities = procfs.effective_capabilities();
  return !capabilities || (*capabilities >> CAP_SYS_RESOURCE & 1) != 0;
}

class Search {
 public:
  Search(const proc::ProcFs& procfs, const std::vector<GroupMember>& members,
         const CriuOptions& options, bool simulated)
      : procfs_(procfs), options_(options), simulated_(simulated) {
    for (const GroupMember& member : members) {
      processes_.push_back(member.process.info());
      if (member.initial) with_cuda_.insert(member.process.pid().value);
    }
    if (auto tree = procfs.tree(processes_.front().pid)) everybody_ = std::move(*tree);
  }

  std::vector<Finding> run() {
    for (const proc::ProcessInfo& info : everybody_) {
      pids_.insert(info.pid.value);
      if (auto inodes = procfs_.socket_inodes(info.pid))
        sockets_.insert(inodes->begin(), inodes->end());
    }
    if (auto peers = proc::unix_peers()) peers_ = std::move(*peers);
    for (const proc::ProcessInfo& info : processes_) {
      if (const auto tracer = procfs_.tracer(info.pid))
        add(info.pid, kTracer, fmt::format("by process {}", *tracer));
      look_at_user(info.pid);
      look_at_files(info.pid);
      look_at_sockets(info.pid);
      look_at_memory(info.pid);
    }
    return findings();
  }

 private:
  void add(Pid pid, const Kind& kind, std::string value) {
    seen_[{pid.value, &kind}].push_back(std::move(value));
  }

  void look_at_user(Pid pid) {
    const auto details = procfs_.details(pid);
    if (details && details->uid != ::geteuid() && !may_read_limits(procfs_))
      add(pid, kOtherUser, fmt::format("user {}", details->uid));
  }

  void look_at_files(Pid pid) {
    const auto files = procfs_.open_files(pid);
    if (!files) return;
    for (const proc::OpenFile& file : *files) {
      if (is_drivers_file(file.path, simulated_)) continue;
      // The simulated driver's entry in the list of who uses a GPU, which is locked.
      if (simulated_ && file.path.find("/owner-") != std::string::npos) continue;
      const std::string shown = fmt::format("{} (descriptor {})", file.path, file.descriptor);
      look_at_description(pid, file.descriptor, shown);
      if (file.path.starts_with("anon_inode:")) {
        const std::string_view name = std::string_view(file.path).substr(11);
        if (name == "[io_uring]") {
          add(pid, kIoUring, fmt::format("descriptor {}", file.descriptor));
        } else if (name == "inotify") {
          add(pid, kInotify, fmt::format("descriptor {}", file.descriptor));
        } else if (!dumps_anonymous(name)) {
          add(pid, kAnonymous, shown);
        }
      } else if (file.path.starts_with("/secretmem")) {
        add(pid, kSecret, fmt::format("descriptor {}", file.descriptor));
      } else {
        look_at_file(pid, fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor), file.path,
                     shown);
      }
    }
  }

  void look_at_file(Pid pid, const std::string& link, std::string_view path,
                    const std::string& shown) {
    struct stat info {};
    if (::stat(link.c_str(), &info) != 0) return;
    const bool device =
        S_ISBLK(info.st_mode) ||
        (S_ISCHR(info.st_mode) &&
         !dumps_device(major(info.st_rdev), minor(info.st_rdev), !has_our(pid, "net")));
    const std::vector<std::string>& external = options_.external;
    if (device && !is_set(external, "tty[")) add(pid, kDevice, shown);
    const auto size = static_cast<std::uint64_t>(info.st_blocks) * 512;
    if (S_ISREG(info.st_mode) && info.st_nlink == 0 && !path.starts_with("/memfd:") &&
        size > options_.ghost_limit && !is_set(external, "file[")) {
      add(pid, kGhost, fmt::format("{}, {}", shown, format_bytes(size)));
    }
  }

  // What /proc/PID/fdinfo says.
  void look_at_description(Pid pid, int descriptor, const std::string& shown) {
    const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor));
    if (!text) return;
    std::istringstream lines(*text);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("lock:") && !options_.file_locks) {
        const bool of_process = line.find(" POSIX ") != std::string::npos;
        add(pid, of_process && with_cuda_.contains(pid.value) ? kPosixLock : kLock, shown);
        return;
      }
      if (!line.starts_with("Pid:\t")) continue;
      int other = 0;
      std::from_chars(line.data() + 5, line.data() + line.size(), other);
      // -1: it has ended, 0: not to be seen from here.
      if (other > 0 && !is_ours(Pid{other})) add(pid, kPidfd, fmt::format("process {}", other));
    }
  }

  void look_at_sockets(Pid pid) {
    const auto own = procfs_.socket_inodes(pid);
    if (!own || own->empty()) return;
    const std::set<std::uint64_t> inodes(own->begin(), own->end());
    if (!options_.tcp_established && !options_.tcp_close) {
      for (const proc::TcpSocket& socket : tcp_sockets_beside(pid)) {
        if (!socket.listens && inodes.contains(socket.inode))
          add(pid, kTcp, fmt::format("local port {}", socket.local_port));
      }
    }
    for (const std::uint64_t inode : inodes) {
      // Of our network namespace; the numbers are those of no other.
      const auto it = peers_.find(inode);
      if (it == peers_.end() || sockets_.contains(it->second.inode)) continue;
      if (options_.ext_unix_sk && it->second.datagram) continue;
      const std::string name = fmt::format("unix[{}]", inode);
      const auto& external = options_.external;
      if (std::any_of(external.begin(), external.end(),
                      [&](const std::string& one) { return one.starts_with(name); })) {
        continue;
      }
      add(pid, kUnix, fmt::format("socket {}", inode));
    }
  }

  // All of its network namespace, which takes long to read where there are many.
  const std::vector<proc::TcpSocket>& tcp_sockets_beside(Pid pid) {
    struct stat space {};
    (void)::stat(fmt::format("/proc/{}/ns/net", pid.value).c_str(), &space);
    const auto [it, is_new] = tcp_sockets_.try_emplace(space.st_ino);
    if (!is_new) return it->second;
    if (auto sockets = procfs_.tcp_sockets(pid)) it->second = std::move(*sockets);
    return it->second;
  }

  // Somebody's child may be so young that nobody has heard of it yet.
  bool is_ours(Pid pid) const {
    constexpr int kGenerations = 64;
    for (int i = 0; i < kGenerations && pid.value > 1; ++i) {
      if (pids_.contains(pid.value)) return true;
      const auto info = procfs_.process(pid);
      if (!info) return true;  // it has ended since
      pid = info->parent;
    }
    return false;
  }

  void look_at_memory(Pid pid) {
    const auto mappings = procfs_.mappings(pid);
    if (!mappings) return;
    std::uint64_t reserved = 0;
    for (const proc::Mapping& mapping : *mappings) {
      if (mapping.permissions == "---p" && mapping.path.empty())
        reserved += mapping.end - mapping.start;
      if (mapping.path.starts_with("/SYSV") && has_our(pid, "ipc")) add(pid, kSysv, mapping.path);
      if (mapping.path.starts_with("/secretmem")) add(pid, kSecret, "mapped");
      const bool deleted_file = mapping.path.ends_with(" (deleted)") &&
                                !is_of_no_file(mapping.path) &&
                                !is_drivers_file(mapping.path, simulated_);
      if (!deleted_file) continue;
      look_at_file(
          pid, fmt::format("/proc/{}/map_files/{:x}-{:x}", pid.value, mapping.start, mapping.end),
          mapping.path, mapping.path);
    }
    if (reserved > kMuchReserved) add(pid, kReserved, format_bytes(reserved));
  }

  // Does it live in our namespace of that kind?
  static bool has_our(Pid pid, std::string_view kind) {
    struct stat ours {};
    struct stat theirs {};
    return ::stat(fmt::format("/proc/self/ns/{}", kind).c_str(), &ours) == 0 &&
           ::stat(fmt::format("/proc/{}/ns/{}", pid.value, kind).c_str(), &theirs) == 0 &&
           ours.st_ino == theirs.st_ino;
  }

  std::vector<Finding> findings() const {
    std::vector<Finding> out;
    for (const proc::ProcessInfo& info : processes_) {
      for (const auto& [key, values] : seen_) {
        if (key.first != info.pid.value) continue;
        std::vector<std::string> shown(values);
        std::sort(shown.begin(), shown.end());
        shown.erase(std::unique(shown.begin(), shown.end()), shown.end());
        const std::size_t all = shown.size();
        shown.resize(std::min(all, kShown));
        out.push_back({std::string(key.second->id), key.second->light,
                       fmt::format("process {} ({}) {}: {}{}", info.pid.value, info.comm,
                                   key.second->what, fmt::join(shown, ", "),
                                   all > kShown ? fmt::format(" and {} more", all - kShown) : ""),
                       std::string(key.second->remedy)});
      }
    }
    return out;
  }

  const proc::ProcFs& procfs_;
  const CriuOptions& options_;
  bool simulated_;
  std::vector<proc::ProcessInfo> processes_;
  std::vector<proc::ProcessInfo> everybody_;  // the tree as it is now, zombies too
  std::set<int> with_cuda_;
  std::set<int> pids_;
  std::set<std::uint64_t> sockets_;
  std::map<std::uint64_t, proc::UnixPeer> peers_;
  std::map<ino_t, std::vector<proc::TcpSocket>> tcp_sockets_;
  std::map<std::pair<int, const Kind*>, std::vector<std::string>> seen_;
};

}  // namespace

std::vector<Finding> find_undumpable(const proc::ProcFs& procfs,
                                     const std::vector<GroupMember>& members,
                                     const CriuOptions& options, bool simulated) {
  auto found = Search(procfs, members, options, simulated).run();
  const bool any_red = worst(found) == Light::kRed;
  if (!any_red) return found;
  // A program that starts processes, or opens and closes sockets, looks worse for a moment than it
  // is.
  constexpr std::chrono::milliseconds kMoment{30};
  std::this_thread::sleep_for(kMoment);
  const auto again = Search(procfs, members, options, simulated).run();
  std::erase_if(found, [&](const Finding& one) {
    return one.light == Light::kRed &&
           std::none_of(again.begin(), again.end(), [&](const Finding& other) {
             return other.id == one.id && other.light == Light::kRed;
           });
  });
  return found;
}

}  // namespace stasis
