// Long because the search over a process's files adds to one list of kinds, each with its words and
// remedy.
#include "doctor/criu_obstacles.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/kcmp.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <ctime>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/listing.h"
#include "base/scope_guard.h"
#include "base/threads.h"
#include "base/units.h"
#include "checkpoint/inherited_files.h"
#include "doctor/criu_checks.h"
#include "doctor/inotify_watches.h"
#include "proc/mounts.h"
#include "proc/process_file.h"
#include "proc/served_files.h"
#include "proc/tcp_connections.h"
#include "proc/unix_peers.h"

namespace stasis {
namespace doctor {

void Signs::add(Pid pid, const Kind& kind, std::string value) {
  const std::scoped_lock lock(mutex_);
  // Three are shown; a hostile program may have millions.
  constexpr std::size_t kMost = 1000;
  std::vector<std::string>& values = seen_[{pid.value, &kind}];
  if (values.size() < kMost) values.push_back(std::move(value));
}

std::vector<Obstacle> Signs::obstacles(const std::vector<proc::ProcessInfo>& processes) const {
  constexpr std::size_t kShown = 3;
  const std::scoped_lock lock(mutex_);
  std::vector<Obstacle> out;
  for (const proc::ProcessInfo& info : processes) {
    for (const auto& [key, values] : seen_) {
      if (key.first != info.pid.value) continue;
      std::vector<std::string> shown(values);
      std::sort(shown.begin(), shown.end());
      shown.erase(std::unique(shown.begin(), shown.end()), shown.end());
      out.push_back({key.second->id, key.second->severity, info.pid,
                     fmt::format("process {} ({}) {}: {}", info.pid.value, info.comm,
                                 key.second->what, listed(shown, ", ", kShown)),
                     std::string(key.second->remedy), key.second->by});
    }
  }
  return out;
}

bool is_of_no_file(std::string_view path) {
  constexpr std::array<std::string_view, 5> kNames = {"/SYSV", "/dev/zero", "/anon_hugepage",
                                                      "/[aio]", "/memfd:"};
  return std::any_of(kNames.begin(), kNames.end(),
                     [path](std::string_view name) { return path.starts_with(name); });
}

}  // namespace doctor

namespace {

using doctor::is_of_no_file;
using doctor::Kind;
using doctor::Signs;

constexpr Kind kIoUring{
    "io-uring", Severity::kRed, "has an io_uring open, which CRIU cannot dump",
    "start it with `stasis run --no-io-uring`, or turn io_uring off in the program"};
constexpr Kind kAnonymous{"anonymous-file", Severity::kRed,
                          "has files of a kind open that CRIU cannot dump",
                          "close them before the dump"};
constexpr Kind kDevice{"device", Severity::kRed, "has devices open that CRIU cannot dump",
                       "close them before the dump"};
constexpr Kind kPidfd{"pidfd", Severity::kRed, "holds a pidfd of a process outside of the tree",
                      "dump that process too, or close the pidfd"};
constexpr Kind kSecret{"secret-memory", Severity::kRed,
                       "has memory that the kernel shows to no other process (memfd_secret)",
                       "do without in the program"};
constexpr Kind kSysv{"sysv-memory", Severity::kRed,
                     "has System V shared memory, and its IPC namespace is not its own",
                     "start it in one of its own: unshare --ipc"};
constexpr Kind kGhost{"deleted-file", Severity::kRed,
                      "has deleted files open that are larger than --ghost-limit",
                      "give a larger --ghost-limit, or close them before the dump"};
constexpr Kind kLock{"file-lock", Severity::kRed, "holds file locks", "dump with --file-locks"};
// The other files of driver 580 are in every process that is forked from one with CUDA, and CRIU
// dumps them there; but such locks are not inherited.
constexpr Kind kPosixLock{"file-lock", Severity::kYellow,
                          "holds file locks, if not the driver does", "dump with --file-locks"};
// CRIU 4.2.1 writes a lock of fcntl(2) down where it first meets the open file, if its owner is
// there.
constexpr Kind kLostLock{"file-lock", Severity::kRed,
                         "holds file locks (fcntl) by descriptors that it has from another process "
                         "of the tree, which CRIU loses",
                         "let it open the file itself, or lock it by flock() or F_OFD_SETLK"};
constexpr Kind kTcp{"tcp-connection", Severity::kRed, "has open TCP connections",
                    "dump with --tcp-established to keep them, or --tcp-close to drop them"};
constexpr Kind kUnix{
    "unix-socket", Severity::kRed, "has unix sockets connected to processes outside of the tree",
    "dump those too, close the connection, name it (--external 'unix[NUMBER]'), or, "
    "if it is a named datagram socket, let it be cut with --ext-unix-sk"};
constexpr Kind kSocket{"socket", Severity::kRed, "has sockets of a kind open that CRIU cannot dump",
                       "close them before the dump; for MPTCP in Go: GODEBUG=multipathtcp=0"};
constexpr Kind kPacketPipe{"packet-pipe", Severity::kRed,
                           "has pipes that keep packets apart (O_DIRECT), which CRIU cannot dump",
                           "do without O_DIRECT in pipe2(), or close them before the dump"};
constexpr Kind kPathOnly{"path-only", Severity::kRed,
                         "has files open by O_PATH of a kind that CRIU cannot dump, or not restore",
                         "close them before the dump, or open them without O_PATH"};
constexpr Kind kNotWritable{"immutable-file", Severity::kYellow,
                            "has files open for writing that were made immutable or append-only "
                            "since (chattr), and that no restore opens for writing before they are "
                            "made writable again",
                            "chattr -i or -a before the restore"};
constexpr Kind kNoFile{"program-without-file", Severity::kRed,
                       "runs from memory (memfd_create), which no restore executes again",
                       "start the program from a file"};
constexpr Kind kHighDescriptor{
    "high-descriptor", Severity::kRed,
    "has descriptors so near to the limit of open files that CRIU, which needs some above them, "
    "could not restore it",
    "raise the limit for stasis (ulimit -Hn; as root with CAP_SYS_RESOURCE it is fs.nr_open)"};
constexpr Kind kNames{"memory-names", Severity::kYellow,
                      "has given memory names (PR_SET_VMA), without which it is restored",
                      "nothing, if only people and profilers read them"};
constexpr Kind kPidfdThread{"pidfd", Severity::kRed,
                            "holds a pidfd of a thread, which CRIU cannot dump",
                            "do without PIDFD_THREAD in pidfd_open(), or close it"};
constexpr Kind kHugeGhost{"deleted-file", Severity::kRed,
                          "uses deleted files of a hugetlbfs, which CRIU cannot dump",
                          "use memfd_create(MFD_HUGETLB) or MAP_HUGETLB instead, or do not delete "
                          "them"};
constexpr Kind kGhostAttributes{
    "deleted-attributes", Severity::kYellow,
    "has deleted files, or memory of memfd_create, open with extended attributes, without which "
    "CRIU restores them",
    "do without the attributes, or do not delete the file"};
constexpr Kind kRemap{"link-remap", Severity::kRed,
                      "has files open whose name was removed, but which have other names (as a "
                      "semaphore in /dev/shm has in the process that made it)",
                      "dump without --no-link-remap"};
// CRIU counts from a small number for each dump, and Stasis gives its files other names right
// after.
constexpr Kind kRemapTaken{
    "link-remap-taken", Severity::kRed,
    "has files open whose name was removed, and CRIU's names for such files are taken in their "
    "directory by another dump",
    "wait for a dump that is under way; a file that stays is of an image that criu or an earlier "
    "stasis has made: restore that image, or remove both"};
constexpr Kind kHuge{"huge-pages", Severity::kYellow, "has memory of huge pages (hugetlb)",
                     "set aside as many where it is restored: sysctl vm.nr_hugepages"};
// CRIU makes a mapping of huge pages to learn what device they are of, and keeps that in a file.
constexpr Kind kHugeFull{"huge-pages", Severity::kRed,
                         "has memory of huge pages (hugetlb), and CRIU needs one that is free to "
                         "dump them",
                         "set one more aside: sysctl vm.nr_hugepages"};
constexpr Kind kSharedFile{"shared-memory", Severity::kYellow,
                           "uses files of /dev/shm, which are no part of an image",
                           "keep them until the restore: a reboot or another machine has none"};
constexpr Kind kOtherUser{"other-user", Severity::kRed,
                          "runs as another user or group, so that CRIU may not read its limits",
                          "give stasis CAP_SYS_RESOURCE, or run it as that user"};
constexpr Kind kTracer{"tracer", Severity::kRed, "is being traced, which CRIU cannot do then",
                       "detach the debugger, or wait until the other tool has ended"};
constexpr Kind kInotify{"inotify", Severity::kYellow,
                        "watches files by inotify or fanotify that CRIU may not find again",
                        "give stasis CAP_DAC_READ_SEARCH, and watch files of a file system that "
                        "opens files by handle (ext4, xfs, tmpfs; not an overlay)"};
constexpr Kind kLostWatch{"inotify", Severity::kRed,
                          "watches files by inotify or fanotify that CRIU cannot find again",
                          "end such watches before the dump: on /proc, /sys, /dev/pts, an overlay, "
                          "or on deleted files of a tmpfs"};
constexpr Kind kLinkWatch{
    "inotify", Severity::kRed,
    "watches symbolic links themselves (IN_DONT_FOLLOW, "
    "FAN_MARK_DONT_FOLLOW), which CRIU dumps and cannot restore",
    "end such watches before the dump, or watch the directories of the links"};
constexpr Kind kWholeWatch{"inotify", Severity::kYellow,
                           "watches whole file systems by fanotify (FAN_MARK_FILESYSTEM), which a "
                           "restored program watches no more",
                           "let the program mark them again after a restore"};
constexpr Kind kKernelLog{"kernel-log", Severity::kYellow,
                          "has the kernel's log open for reading (/dev/kmsg), which a restored "
                          "program reads from its beginning again",
                          "let the program pass over messages whose numbers it has seen"};
constexpr Kind kUnnamed{"unnamed-file", Severity::kYellow,
                        "has files of O_TMPFILE open, which a restored program cannot give a name",
                        "dump it when the file has its name"};
constexpr Kind kDeletedWatch{"deleted-watch", Severity::kYellow,
                             "watches deleted files by inotify or fanotify, which a restored "
                             "program watches no more",
                             "end such watches, or close the files, before the dump"};
constexpr Kind kWatchFlags{"watch-flags", Severity::kYellow,
                           "watches files by inotify with flags that a restore does not set: it "
                           "is told of more events",
                           "have the program pass over events that it does not expect"};
constexpr Kind kSemaphore{"eventfd", Severity::kYellow,
                          "has eventfds that are semaphores (EFD_SEMAPHORE), which CRIU restores "
                          "as plain counters: a read then takes all of the value",
                          "do without EFD_SEMAPHORE in the program, or restore only what does not "
                          "depend on it"};
// include/timerfd.h of CRIU 4.2.1.
constexpr Kind kAlarmClock{"timerfd", Severity::kRed,
                           "has timerfds by a clock that CRIU does not know (an alarm clock)",
                           "use CLOCK_REALTIME or CLOCK_BOOTTIME in timerfd_create()"};
constexpr Kind kReserved{"reserved-memory", Severity::kYellow, "has much address space reserved",
                         "CRIU keeps 16 bytes for each page of it while it dumps"};

constexpr std::uint64_t kMuchReserved = 256ULL << 30;

// Character devices that CRIU 4.2 dumps (its files.c and tty.c; numbers of the kernel's
// admin-guide/devices.txt): memory, terminals but serial ports of the 4:64 kind and /dev/tty0,
// which is the console that is shown; autofs; a tun in a network namespace of its own.
// Of a descriptor, by the mode that its link in /proc has.
bool is_readable(const std::string& link) {
  struct stat info {};
  return ::lstat(link.c_str(), &info) == 0 && (info.st_mode & S_IRUSR) != 0;
}

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
    case kUsbSerial:
    case kLowDenseSerial:
      return true;
    case kTtyAux:
      return minor <= 2;  // /dev/tty, /dev/console, /dev/ptmx
    case kTty:
      return minor >= 1 && minor < 64;
    case kMisc:
      return minor == 235 || (minor == 200 && has_own_network);
    default:
      return major >= kPtyFirst && major <= kPtyLast;
  }
}

// "clockid: 1"
bool dumps_clock(std::string_view line) {
  int clock = -1;
  const std::size_t at = line.find(' ') + 1;
  std::from_chars(line.data() + at, line.data() + line.size(), clock);
  return clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC || clock == CLOCK_BOOTTIME;
}

bool dumps_anonymous(std::string_view name) {
  constexpr std::array<std::string_view, 6> kKnown = {"[eventfd]", "[eventpoll]", "[signalfd]",
                                                      "[timerfd]", "[pidfd]",     "[fanotify]"};
  return std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end();
}

// What the kernel calls the protocols of the sockets that CRIU 4.2.1 dumps (its sockets.c, and
// sk-inet.c).
bool dumps_protocol(std::string_view name) {
  constexpr std::array<std::string_view, 14> kKnown = {
      "TCP",   "TCPv6", "UDP",    "UDPv6", "UDP-Lite",    "UDPLITEv6", "RAW",
      "RAWv6", "PING",  "PINGv6", "UNIX",  "UNIX-STREAM", "NETLINK",   "PACKET"};
  return std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end();
}

bool is_set(const std::vector<std::string>& external, std::string_view kind) {
  return std::any_of(external.begin(), external.end(),
                     [kind](const std::string& one) { return one.starts_with(kind); });
}

// Of the hugetlbfs that the file is on; nothing if it is on none.
std::optional<std::uint64_t> huge_page_size(Pid pid, const std::string& link) {
  const auto system = proc::file_system_of(pid, link);
  if (!system || system->f_type != HUGETLBFS_MAGIC) return std::nullopt;
  return static_cast<std::uint64_t>(system->f_bsize);
}

// Whether CRIU knows, or can learn, what device huge pages of that size are of. What it has learnt
// before it keeps as a table of such numbers in a file, beside much else.
bool knows_huge_pages(std::uint64_t page, dev_t device) {
  constexpr const char* kLearnt = "/run/criu.kdat";
  const auto learnt = read_file(AT_FDCWD, kLearnt);
  if (!learnt && ::access(kLearnt, F_OK) == 0) return true;  // who may know
  const std::string_view known = learnt ? std::string_view(*learnt) : std::string_view();
  const std::string_view wanted(reinterpret_cast<const char*>(&device), sizeof device);
  for (std::size_t at = 0; at + sizeof device <= known.size(); at += sizeof device)
    if (known.substr(at, sizeof device) == wanted) return true;
  const std::string folder = fmt::format("/sys/kernel/mm/hugepages/hugepages-{}kB", page / 1024);
  const auto figure = [&](const char* name) {
    return read_number(fmt::format("{}/{}", folder, name)).value_or(0);
  };
  return figure("free_hugepages") > figure("resv_hugepages") ||
         figure("nr_overcommit_hugepages") > figure("surplus_hugepages");
}

// Of the file's extended attributes, those that its program may have set: a label of a security
// module is given by the kernel.
std::vector<std::string> attributes_of(Pid pid, const std::string& link) {
  std::vector<std::string> out;
  if (proc::is_served(pid, link) || !proc::answers(pid, link)) return out;
  std::array<char, 4096> names{};
  const ssize_t size = ::listxattr(link.c_str(), names.data(), names.size());
  for (ssize_t at = 0; at < size; at += static_cast<ssize_t>(out.back().size()) + 1)
    out.emplace_back(names.data() + at);
  std::erase_if(out, [](const std::string& name) { return name.starts_with("security."); });
  return out;
}

// Does any name lead to the file?
bool has_name(const std::string& link) {
  const auto info = proc::known_status(link);
  return info && info->st_nlink > 0;
}

unsigned octal(std::string_view text) {
  unsigned value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 8);
  return value;
}

// How many a criu that we start may have open: it raises its limit as far as it may.
std::uint64_t limit_of_descriptors(const proc::ProcFs& procfs) {
  const auto capabilities = procfs.effective_capabilities();
  const bool may_raise = capabilities && (*capabilities >> CAP_SYS_RESOURCE & 1) != 0 &&
                         !procfs.in_own_user_namespace();
  if (may_raise) return read_number("/proc/sys/fs/nr_open").value_or(RLIM_INFINITY);
  rlimit own{};
  return ::getrlimit(RLIMIT_NOFILE, &own) == 0 ? own.rlim_max : RLIM_INFINITY;
}

bool may_read_limits(const proc::ProcFs& procfs) {
  const auto capabilities = procfs.effective_capabilities();
  return !capabilities || (*capabilities >> CAP_SYS_RESOURCE & 1) != 0;
}

// The first of its users and groups that is not ours: check_prlimit_permission() of kernel/sys.c
// compares real, effective and saved ones.
std::string other_owner(Pid pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid.value));
  std::istringstream lines(text.value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const bool is_user = line.starts_with("Uid:\t");
    if (!is_user && !line.starts_with("Gid:\t")) continue;
    std::istringstream numbers(line.substr(5));
    for (int kind = 0; kind < 3; ++kind) {
      unsigned number = 0;
      if ((numbers >> number) && number != (is_user ? ::getuid() : ::getgid()))
        return fmt::format("{} {}", is_user ? "user" : "group", number);
    }
  }
  return {};
}

class Search {
 public:
  Search(const proc::ProcFs& procfs, const std::vector<TreeMember>& members,
         const CriuOptions& options, bool simulated, std::span<const std::string> connected,
         const Interrupt& interrupt)
      : procfs_(procfs),
        facts_(procfs, &interrupt),
        options_(options),
        simulated_(simulated),
        connected_(connected) {
    for (const TreeMember& member : members) {
      processes_.push_back(member.process.info());
      if (member.initial) with_cuda_.insert(member.process.pid().value);
    }
    if (auto tree = procfs.tree(processes_.front().pid)) all_processes_ = std::move(*tree);
  }

  std::vector<Obstacle> run() {
    share_out(all_processes_.size(), [&](std::size_t i) {
      (void)facts_.open_files(all_processes_[i].pid);
      (void)facts_.mappings(all_processes_[i].pid);
    });
    for (const proc::ProcessInfo& info : all_processes_) {
      pids_.insert(info.pid.value);
      if (const auto files = facts_.open_files(info.pid)) {
        const auto inodes = proc::socket_inodes(*files);
        sockets_.insert(inodes.begin(), inodes.end());
      }
    }
    proc::HeldFiles held;
    if (doctor::probe_held(facts_, processes_, held, signs_)) return signs_.obstacles(processes_);
    if (auto peers = proc::unix_peers()) peers_ = std::move(*peers);
    const auto parts = parts_of_search();
    share_out(parts.size(), [&](std::size_t i) { parts[i](); });
    return signs_.obstacles(processes_);
  }

 private:
  // Those first that take long.
  std::vector<std::function<void()>> parts_of_search() {
    return {
        [&] { doctor::probe_seals(facts_, processes_, signs_); },
        [&] { doctor::probe_numa(processes_, signs_); },
        [&] { doctor::probe_code(facts_, processes_, signs_); },
        [&] { doctor::probe_mounts(facts_, processes_, options_, simulated_, signs_); },
        [&] { doctor::probe_shared(facts_, all_processes_, options_, simulated_, signs_); },
        [&] { for_each([this](Pid pid) { probe_files(pid); }); },
        [&] { for_each([this](Pid pid) { probe_memory(pid); }); },
        [&] { for_each([this](Pid pid) { probe_sockets(pid); }); },
        [&] {
          for_each([this](Pid pid) {
            probe_tracer(pid);
            probe_user(pid);
            probe_program(pid);
          });
        },
        [&] { doctor::probe_shared_processes(processes_, signs_); },
        [&] { doctor::probe_pipes(facts_, all_processes_, connected_, signs_); },
        [&] {
          doctor::probe_namespaces(facts_, processes_, options_, signs_);
          doctor::probe_networks(facts_, processes_, options_, signs_);
          doctor::probe_namespace_files(facts_, processes_, signs_);
          doctor::probe_sessions(facts_, processes_, signs_);
        },
        [&] {
          doctor::probe_seccomp(facts_, processes_, options_, signs_);
          doctor::probe_threads(facts_, processes_, signs_);
          doctor::probe_exit_signals(all_processes_, signs_);
          doctor::probe_children(facts_, all_processes_, signs_);
          doctor::probe_zombies(facts_, all_processes_, processes_.front().pid, signs_);
        },
        [&] {
          doctor::probe_cgroups(facts_, processes_, options_, signs_);
          doctor::probe_lines(facts_, processes_, signs_);
          doctor::probe_procfs(facts_, processes_, all_processes_, signs_);
        },
        [&] {
          doctor::probe_timers(facts_, processes_, all_processes_, signs_);
          doctor::probe_epolls(facts_, processes_, signs_);
          doctor::probe_socket_names(facts_, processes_, signs_);
          doctor::probe_socket_states(facts_, processes_, options_.tcp_close, signs_);
          doctor::probe_folder_watches(processes_, signs_);
          doctor::probe_mapped_locks(facts_, processes_, signs_);
          doctor::probe_semaphores(facts_, processes_, signs_);
          doctor::probe_terminals(facts_, processes_, options_, signs_);
          doctor::probe_copied_up(facts_, processes_, signs_);
        },
    };
  }

  void for_each(const std::function<void(Pid)>& probe) {
    for (const proc::ProcessInfo& info : processes_)
      probe(info.pid);
  }

  void probe_tracer(Pid pid) {
    if (const auto tracer = procfs_.tracer(pid))
      signs_.add(pid, kTracer, fmt::format("by process {}", *tracer));
  }

  void probe_program(Pid pid) {
    std::array<char, 16> name{};
    const std::string link = fmt::format("/proc/{}/exe", pid.value);
    const ssize_t size = ::readlink(link.c_str(), name.data(), name.size());
    const std::string_view begin(name.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
    if (begin.starts_with("/memfd:"))
      signs_.add(pid, kNoFile, "/proc/PID/exe is " + std::string(begin));
  }

  void probe_user(Pid pid) {
    if (const std::string other = other_owner(pid); !other.empty() && !may_read_limits(procfs_))
      signs_.add(pid, kOtherUser, other);
  }

  void probe_files(Pid pid) {
    const auto files = facts_.open_files(pid);
    if (!files) return;
    probe_last_descriptor(pid, *files);
    for (const proc::OpenFile& file : *files) {
      if (facts_.is_over()) return;
      if (is_drivers_file(file.path, simulated_)) continue;
      // The simulated driver's entry in the list of who uses a GPU, which is locked.
      if (simulated_ && file.path.find("/owner-") != std::string::npos) continue;
      const std::string shown = fmt::format("{} (descriptor {})", file.path, file.descriptor);
      probe_description(pid, file, shown);
      if (file.path.starts_with("anon_inode:")) {
        const std::string_view name = std::string_view(file.path).substr(11);
        if (name == "[io_uring]") {
          signs_.add(pid, kIoUring, fmt::format("descriptor {}", file.descriptor));
        } else if (name == "inotify" || name == "[fanotify]") {
          probe_watches(pid, file.descriptor);
        } else if (!dumps_anonymous(name)) {
          signs_.add(pid, kAnonymous, shown);
        }
      } else if (file.path.starts_with("socket:")) {
        probe_protocol(pid, file.descriptor);
      } else if (file.path.starts_with("/secretmem")) {
        signs_.add(pid, kSecret, fmt::format("descriptor {}", file.descriptor));
      } else {
        probe_file(pid, fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor), file.path,
                   shown);
      }
    }
  }

  void probe_watches(Pid pid, int descriptor) {
    const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor));
    if (!text) return;
    for (const Watch& watch : watches_.probe(pid, *text)) {
      const std::string shown = fmt::format("{} (descriptor {})", watch.what, descriptor);
      if (!watch.flags.empty() && watch.light != WatchLight::kDeleted)
        signs_.add(pid, kWatchFlags, fmt::format("{} of {}", watch.flags, shown));
      switch (watch.light) {
        case WatchLight::kFine:
          break;
        case WatchLight::kUnknown:
          signs_.add(pid, kInotify, shown);
          break;
        case WatchLight::kWhole:
          signs_.add(pid, kWholeWatch, shown);
          break;
        case WatchLight::kLost:
          signs_.add(pid, kLostWatch, shown);
          break;
        case WatchLight::kDeleted:
          signs_.add(pid, kDeletedWatch, shown);
          break;
        case WatchLight::kLink:
          signs_.add(pid, kLinkWatch, shown);
          break;
      }
    }
  }

  void probe_protocol(Pid pid, int descriptor) {
    const auto name = procfs_.socket_protocol(pid, descriptor);
    if (name && !dumps_protocol(*name))
      signs_.add(pid, kSocket, fmt::format("{} (descriptor {})", *name, descriptor));
  }

  void probe_file(Pid pid, const std::string& link, std::string_view path,
                  const std::string& shown) {
    const auto info = proc::known_status(link);
    if (!info) return;
    const bool device =
        S_ISBLK(info->st_mode) ||
        (S_ISCHR(info->st_mode) && !dumps_device(major(info->st_rdev), minor(info->st_rdev),
                                                 !facts_.has_our_namespace(pid, "net")));
    const std::vector<std::string>& external = options_.external;
    if (device && !is_set(external, "tty[")) signs_.add(pid, kDevice, shown);
    if (S_ISCHR(info->st_mode) && info->st_rdev == makedev(1, 11) && is_readable(link))
      signs_.add(pid, kKernelLog, shown);
    if (path.starts_with("/memfd:")) probe_huge_memory(pid, link);
    const bool has_file = S_ISREG(info->st_mode) && !is_of_no_file(path);
    if ((has_file || path.starts_with("/memfd:")) && info->st_nlink == 0) {
      for (const std::string& name : attributes_of(pid, link))
        signs_.add(pid, kGhostAttributes, fmt::format("{} of {}", name, shown));
    }
    if (has_file && info->st_nlink == 0 && huge_page_size(pid, link))
      signs_.add(pid, kHugeGhost, shown);
    if (has_file && info->st_nlink > 0 && path.ends_with(" (deleted)") && !options_.link_remap)
      signs_.add(pid, kRemap, shown);
    if (has_file && info->st_nlink > 0 && path.ends_with(" (deleted)"))
      probe_taken_names(pid, path);
    const auto size = static_cast<std::uint64_t>(info->st_blocks) * 512;
    if (S_ISREG(info->st_mode) && info->st_nlink == 0 && !path.starts_with("/memfd:") &&
        size > options_.ghost_limit && !is_set(external, "file[")) {
      signs_.add(pid, kGhost, fmt::format("{}, {}", shown, format_bytes(size)));
    }
  }

  // Of memfd_create(MFD_HUGETLB), mapped or not.
  void probe_huge_memory(Pid pid, const std::string& link) {
    const auto page = huge_page_size(pid, link);
    const auto info = proc::known_status(link);
    if (page && info && !knows_huge_pages(*page, info->st_dev))
      signs_.add(pid, kHugeFull, format_bytes(*page) + " each");
  }

  // link_remap.N beside the file: one is enough to be refused.
  void probe_taken_names(Pid pid, std::string_view path) {
    constexpr std::string_view kOfCriu = "link_remap.";
    const std::string_view folder = path.substr(0, path.rfind('/') + 1);
    if (!looked_in_.emplace(pid, folder).second) return;
    if (proc::leads_over_served(pid, std::string(folder))) return;
    const auto names = list_open(fmt::format("/proc/{}/root{}", pid.value, folder));
    if (!names) return;
    while (const dirent* entry = facts_.is_over() ? nullptr : ::readdir(names.get())) {
      const std::string_view name = entry->d_name;
      if (name.size() <= kOfCriu.size() || !name.starts_with(kOfCriu) ||
          name.find_first_not_of("0123456789", kOfCriu.size()) != std::string_view::npos)
        continue;
      signs_.add(pid, kRemapTaken, fmt::format("{}{}", folder, name));
      return;
    }
  }

  // Whether one of the tree that CRIU comes to before this one has the same open file. By its name
  // first: a file system that a program serves would have to answer for more.
  bool is_from_another(Pid pid, const proc::OpenFile& held) {
    for (const proc::ProcessInfo& other : processes_) {
      if (other.pid == pid) return false;
      const auto files = facts_.open_files(other.pid);
      if (!files) continue;
      for (const proc::OpenFile& file : *files) {
        if (file.path == held.path && ::syscall(SYS_kcmp, pid.value, other.pid.value, KCMP_FILE,
                                                held.descriptor, file.descriptor) == 0)
          return true;
      }
    }
    return false;
  }

  // What /proc/PID/fdinfo says.
  void probe_description(Pid pid, const proc::OpenFile& file, const std::string& shown) {
    const auto text =
        read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, file.descriptor));
    if (!text) return;
    std::istringstream lines(*text);
    unsigned flags = 0;
    for (std::string line; std::getline(lines, line);) {
      const bool is_lock = line.starts_with("lock:");
      const bool of_process = is_lock && line.find(" POSIX ") != std::string::npos;
      if (of_process && options_.file_locks && is_from_another(pid, file)) {
        signs_.add(pid, kLostLock, shown);
        return;
      }
      if (is_lock && !options_.file_locks) {
        signs_.add(pid, of_process && with_cuda_.contains(pid.value) ? kPosixLock : kLock, shown);
        return;
      }
      if (line.starts_with("flags:\t")) flags = octal(std::string_view(line).substr(7));
      if (line == "eventfd-semaphore: 1") signs_.add(pid, kSemaphore, shown);
      if (line.starts_with("clockid: ") && !dumps_clock(line)) signs_.add(pid, kAlarmClock, shown);
      if (!line.starts_with("Pid:\t")) continue;
      if ((flags & O_EXCL) != 0) signs_.add(pid, kPidfdThread, shown);  // PIDFD_THREAD
      int other = 0;
      std::from_chars(line.data() + 5, line.data() + line.size(), other);
      // -1: it has ended, 0: not to be seen from here.
      if (other > 0 && !is_ours(Pid{other}))
        signs_.add(pid, kPidfd, fmt::format("process {}", other));
    }
    if ((flags & O_DIRECT) != 0 && shown.starts_with("pipe:")) signs_.add(pid, kPacketPipe, shown);
    if ((flags & (O_WRONLY | O_RDWR)) != 0 && (flags & O_PATH) == 0 &&
        is_kept_from_writes(pid, file, flags))
      signs_.add(pid, kNotWritable, shown);
    if ((flags & O_PATH) != 0 && !dumps_path_only(pid, file)) signs_.add(pid, kPathOnly, shown);
    if ((flags & O_TMPFILE) == O_TMPFILE && (flags & O_EXCL) == 0 && file.path.starts_with('/') &&
        !has_name(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor)))
      signs_.add(pid, kUnnamed, shown);
  }

  // By chattr(1), after it was opened.
  static bool is_kept_from_writes(Pid pid, const proc::OpenFile& file, unsigned flags) {
    if (!file.path.starts_with('/') || file.path.starts_with("/memfd:")) return false;
    struct statx info {};
    const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor);
    if (::statx(AT_FDCWD, link.c_str(), AT_STATX_DONT_SYNC, STATX_TYPE, &info) != 0) return false;
    return (info.stx_attributes & STATX_ATTR_IMMUTABLE) != 0 ||
           ((info.stx_attributes & STATX_ATTR_APPEND) != 0 && (flags & O_APPEND) == 0);
  }

  // By CRIU 4.2.1: what it asks of a pipe, a socket's name or a terminal, it asks by that
  // descriptor.
  static bool dumps_path_only(Pid pid, const proc::OpenFile& file) {
    if (!file.path.starts_with('/') || file.path.starts_with("/memfd:")) return false;
    const auto info = proc::known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
    constexpr unsigned kMemory = 1;  // /dev/null and its like, which are as files to CRIU
    return !info || S_ISREG(info->st_mode) || S_ISDIR(info->st_mode) || S_ISLNK(info->st_mode) ||
           (S_ISCHR(info->st_mode) && major(info->st_rdev) == kMemory);
  }

  // choose_service_fd_base() of CRIU's servicefd.c: sixteen descriptors of its own and room for as
  // many lie between the last one and a multiple of 128.
  void probe_last_descriptor(Pid pid, const std::vector<proc::OpenFile>& files) {
    constexpr std::uint64_t kOfCriu = 32;
    constexpr std::uint64_t kAligned = 128;
    int last = 0;
    for (const proc::OpenFile& file : files)
      last = std::max(last, file.descriptor);
    if (limit_of_descriptors(procfs_) / kAligned * kAligned <
        static_cast<std::uint64_t>(last) + kOfCriu)
      signs_.add(pid, kHighDescriptor, fmt::format("descriptor {}", last));
  }

  void probe_sockets(Pid pid) {
    const auto files = facts_.open_files(pid);
    if (!files) return;
    const auto own = proc::socket_inodes(*files);
    const std::set<std::uint64_t> inodes(own.begin(), own.end());
    if (inodes.empty()) return;
    const auto tcp = procfs_.tcp_socket_inodes(pid);
    if (!options_.tcp_established && !options_.tcp_close && !(tcp && tcp->empty())) {
      const proc::TcpTable& table = tcp_sockets_beside(pid);
      for (const proc::InetSocket& socket : table.sockets()) {
        if (!socket.listens && inodes.contains(socket.inode) &&
            !table.stays_within(socket, sockets_) && some_lead_out())
          signs_.add(pid, kTcp, fmt::format("local port {}", socket.local_port));
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
      signs_.add(pid, kUnix, fmt::format("socket {}", inode));
    }
  }

  // All of its network namespace, which takes long to read where there are many.
  // One that the tree is just making seems to.
  bool some_lead_out() {
    if (!reach_) reach_ = proc::tcp_reach(procfs_, processes_);
    return *reach_ == proc::TcpReach::kOutside;
  }

  const proc::TcpTable& tcp_sockets_beside(Pid pid) {
    const ino_t space = facts_.namespace_of(pid, "net");
    const auto it = tcp_sockets_.find(space);
    if (it != tcp_sockets_.end()) return it->second;
    return tcp_sockets_.emplace(space, proc::TcpTable(procfs_, pid)).first->second;
  }

  // A child may be so young that no list has it yet.
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

  void probe_memory(Pid pid) {
    const auto mappings = facts_.mappings(pid);
    if (!mappings) return;
    std::uint64_t reserved = 0;
    std::uint64_t huge = 0;
    std::map<std::pair<std::uint64_t, std::string>, std::optional<std::uint64_t>> page_sizes;
    for (const proc::Mapping& mapping : *mappings) {
      if (facts_.is_over()) return;
      if (mapping.path.starts_with("[anon:") || mapping.path.starts_with("[anon_shmem:"))
        signs_.add(pid, kNames, mapping.path);
      if (mapping.path.starts_with("anon_inode:")) probe_anonymous_mapping(pid, mapping.path);
      const bool nameless = mapping.path.starts_with("/anon_hugepage");
      if (nameless || mapping.permissions.ends_with('s')) {
        // A file may be mapped thousands of times.
        const auto [known, is_new] = page_sizes.try_emplace({mapping.inode, mapping.path});
        if (is_new) known->second = huge_page_size(pid, proc::MappedFile(pid, mapping).link());
        if (const auto page = known->second) {
          huge += mapping.end - mapping.start;
          if (is_new && (nameless || mapping.path.starts_with("/memfd:")))
            probe_huge_memory(pid, proc::MappedFile(pid, mapping).link());
        }
      }
      if (mapping.path.starts_with("/dev/shm/") &&
          has_name(proc::MappedFile(pid, mapping).link()) &&
          !is_drivers_file(mapping.path, simulated_)) {
        signs_.add(pid, kSharedFile, mapping.path);
      }
      if (mapping.permissions == "---p" && mapping.path.empty())
        reserved += mapping.end - mapping.start;
      if (mapping.path.starts_with("/SYSV") && facts_.has_our_namespace(pid, "ipc"))
        signs_.add(pid, kSysv, mapping.path);
      if (mapping.path.starts_with("/secretmem")) signs_.add(pid, kSecret, "mapped");
      const bool deleted_file = mapping.path.ends_with(" (deleted)") &&
                                !is_of_no_file(mapping.path) &&
                                !is_drivers_file(mapping.path, simulated_);
      if (!deleted_file) continue;
      probe_file(pid, proc::MappedFile(pid, mapping).link(), mapping.path, mapping.path);
    }
    if (huge > 0) signs_.add(pid, kHuge, format_bytes(huge));
    if (reserved > kMuchReserved) signs_.add(pid, kReserved, format_bytes(reserved));
  }

  // The device is closed, its memory still mapped. Of a process with CUDA the driver may have some
  // of its own, which it lets go of.
  void probe_anonymous_mapping(Pid pid, const std::string& path) {
    if (path == "anon_inode:[io_uring]") {
      signs_.add(pid, kIoUring, "mapped");
    } else if (path == "anon_inode:[perf_event]" || !with_cuda_.contains(pid.value)) {
      signs_.add(pid, kAnonymous, path + " (mapped)");
    }
  }

  const proc::ProcFs& procfs_;
  doctor::Facts facts_;
  const CriuOptions& options_;
  bool simulated_;
  std::span<const std::string> connected_;
  std::vector<proc::ProcessInfo> processes_;
  std::vector<proc::ProcessInfo> all_processes_;  // the tree as it is now, zombies too
  std::set<int> with_cuda_;
  std::set<int> pids_;
  std::set<std::uint64_t> sockets_;
  std::map<std::uint64_t, proc::UnixPeer> peers_;
  std::map<ino_t, proc::TcpTable> tcp_sockets_;
  std::optional<proc::TcpReach> reach_;
  WatchSearch watches_;
  std::set<std::pair<Pid, std::string>> looked_in_;  // for link_remap.N, by probe_files() alone
  Signs signs_;
};

}  // namespace

bool passes_by_itself(const Obstacle& one) {
  return one.id == ObstacleId("unread-netlink") || one.id == ObstacleId("unread-urgent") ||
         one.id == ObstacleId("unread-error") || one.id == ObstacleId("unaccepted-connection") ||
         one.id == ObstacleId("pipe-under-way") || one.id == ObstacleId("peek-offset");
}

std::vector<Obstacle> find_undumpable(const proc::ProcFs& procfs,
                                      const std::vector<TreeMember>& members,
                                      const CriuOptions& options, bool simulated,
                                      std::span<const std::string> connected,
                                      const Interrupt& interrupt) {
  const ScopeGuard forget([] { proc::forget_mounts(); });
  auto found = Search(procfs, members, options, simulated, connected, interrupt).run();
  const bool any_red = worst(found) == Severity::kRed;
  // Asked twice already.
  const bool is_held = any_red && found.front().id == ObstacleId("held-file");
  if (!any_red || is_held || interrupt.requested()) return found;
  // A program that starts processes, or opens and closes sockets, looks worse for a moment than it
  // is.
  constexpr std::chrono::milliseconds kMoment{30};
  constexpr std::chrono::milliseconds kLongest{300};
  const auto start = Clock::now();
  for (;;) {
    std::this_thread::sleep_for(kMoment);
    const auto again = Search(procfs, members, options, simulated, connected, interrupt).run();
    std::erase_if(found, [&](const Obstacle& one) {
      return one.severity == Severity::kRed &&
             std::none_of(again.begin(), again.end(), [&](const Obstacle& other) {
               return other.id == one.id && other.severity == Severity::kRed;
             });
    });
    const bool may_pass = worst(found) == Severity::kRed &&
                          std::all_of(found.begin(), found.end(), [](const Obstacle& one) {
                            return one.severity != Severity::kRed || passes_by_itself(one);
                          });
    if (!may_pass || since(start) >= kLongest || interrupt.requested()) return found;
  }
}

}  // namespace stasis
