// Namespaces, as CRIU 4.2.1 was seen to take them: docs/results/2026-11-26-criu-refusals.md.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <optional>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

constexpr Kind kNested{"namespace", Severity::kRed,
                       "lives in a namespace that is not that of the tree, which CRIU cannot dump",
                       "dump that part of the tree by itself, or start it without a namespace of "
                       "its own (unshare, a sandbox)"};
constexpr Kind kTimeForChildren{"namespace", Severity::kRed,
                                "has made a time namespace for its children, which CRIU cannot "
                                "dump",
                                "start it by `unshare --time --fork`, so that it lives in it "
                                "itself"};
constexpr Kind kNumbersForChildren{
    "namespace", Severity::kRed,
    "has made a PID namespace for its children (unshare), which a restore forgets: its next child "
    "would be in that of the tree",
    "start the program without that (`unshare --pid`): a job of `stasis run --images-dir` gets a "
    "PID "
    "namespace of its own; or dump it from inside that namespace, which has a /proc of its own "
    "then "
    "(`unshare --pid --fork --mount-proc`)"};
constexpr Kind kNoInit{"pid-namespace", Severity::kRed,
                       "lives in a container's PID namespace, whose first process is not part of "
                       "the tree",
                       "use the container engine's checkpoint, or dump it from inside the "
                       "container"};
constexpr Kind kInit{"pid-namespace", Severity::kRed,
                     "is the first process of a container's PID namespace, which gets other "
                     "numbers out here at each restore, and its image would never be restored",
                     "use the container engine's checkpoint, or dump it from inside the container"};
constexpr Kind kNoUsers{"user-namespace", Severity::kRed,
                        "lives in a user namespace in which its user has no number",
                        "start it without one, or with its users mapped (unshare --user "
                        "--map-root-user), and dump it from within that namespace"};
// It mounts a /proc there, which only the owner of the PID namespace may.
constexpr Kind kOwnUsers{
    "user-namespace", Severity::kRed,
    "lives in a user namespace of its own, which CRIU dumps and cannot restore",
    "dump it from within that namespace (nsenter --target PID --user), and restore it in a new one "
    "(unshare --user --map-root-user --pid --fork --mount-proc --kill-child)"};
// Its restore wants a root directory for it (--root of CRIU), and fails without one.
constexpr Kind kOwnMounts{
    "namespace", Severity::kRed,
    "lives in a mount namespace of its own, which CRIU dumps and a restore does not make again",
    "dump it from within that namespace (nsenter --target PID --mount), and restore it where its "
    "files have the same names"};
constexpr Kind kOfThread{"thread-namespace", Severity::kRed,
                         "has threads in namespaces of their own, which a restore would take from "
                         "them",
                         "let them be processes of their own"};
constexpr Kind kFile{"namespace-file", Severity::kRed,
                     "has a namespace open in which no process of the tree lives",
                     "close it before the dump"};

constexpr Kind kCgroup{"cgroup", Severity::kYellow,
                       "is in another cgroup than the root of the tree, and a restore puts both "
                       "into that of the tool that restores them, with its limits",
                       "dump with --manage-cgroups soft, if the cgroups are to come back"};

constexpr Kind kOwnCgroups{
    "cgroup", Severity::kYellow,
    "lives in a cgroup namespace of its own, and a restore puts it into that of the tool that "
    "restores it",
    "dump with --manage-cgroups soft, if it is to come back"};

constexpr Kind kCgroupOfThreads{
    "cgroup", Severity::kYellow,
    "has threads in another cgroup than its own, and a restore puts them into that of the tool "
    "that restores it, with its limits",
    "dump with --manage-cgroups soft, if the cgroups are to come back"};

constexpr Kind kOwnPlace{"namespace", Severity::kRed,
                         "lives in a namespace of mounts or of the network that is not that of the "
                         "tree, which CRIU dumps and cannot restore",
                         "dump that part of the tree by itself, or start it without a namespace of "
                         "its own (unshare, ip netns exec, a sandbox)"};

// Those that CRIU refuses by itself where another than the root has one of its own.
constexpr std::array<const char*, 6> kOfRoot = {"pid", "ipc", "uts", "user", "cgroup", "time"};
// Those that a thread may leave alone.
constexpr std::array<const char*, 6> kOfThreads = {"net", "uts",    "ipc",
                                                   "mnt", "cgroup", "pid_for_children"};

// 0 if it cannot be seen.
ino_t namespace_of_thread(Pid pid, Tid thread, std::string_view kind) {
  struct stat info {};
  const std::string path = fmt::format("/proc/{}/task/{}/ns/{}", pid.value, thread.value, kind);
  return ::stat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

// Whether its children are to live in another one than the process itself. One without a first
// process has no number that /proc would show (pidns_for_children_get() of kernel/pid_namespace.c).
bool has_numbers_for_children(Facts& facts, Pid pid) {
  struct stat info {};
  const std::string path = fmt::format("/proc/{}/ns/pid_for_children", pid.value);
  if (::stat(path.c_str(), &info) == 0) {
    const ino_t own = facts.namespace_of(pid, "pid");
    return own != 0 && info.st_ino != own;
  }
  // Of one that has just ended there are neither these nor any other that are not its number's.
  return errno == ENOENT && namespace_of_thread(pid, Tid{pid.value}, "uts") != 0;
}

// "4:memory:/path" of the first version, "0::/path" of the second: the first that differs.
std::optional<std::string> other_cgroup(const std::string& its, const std::string& than) {
  if (than.empty() || its == than) return std::nullopt;
  std::istringstream all(its);
  for (std::string line; std::getline(all, line);)
    if (than.find(line + "\n") == std::string::npos) return line.substr(line.find(':') + 1);
  return std::nullopt;
}

bool maps_no_one(Pid pid, std::string_view map) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/{}", pid.value, map));
  return text && text->empty();
}

void probe_root(Facts& facts, Pid root, const CriuOptions& options, Signs& out) {
  const auto details = facts.procfs().details(root);
  const ino_t pids = facts.namespace_of(root, "pid");
  if (details && pids != 0 && pids != facts.our_namespace("pid"))
    out.add(root, details->ns_pid == 1 ? kInit : kNoInit,
            fmt::format("it is number {} there", details->ns_pid));
  // With mounts from outside it is dumped for a tool that gives it a root.
  const bool has_root_then =
      std::any_of(options.external.begin(), options.external.end(),
                  [](const std::string& one) { return one.starts_with("mnt["); });
  if (pids == facts.our_namespace("pid") && facts.namespace_of(root, "mnt") != 0 &&
      !facts.has_our_namespace(root, "mnt") && !has_root_then)
    out.add(root, kOwnMounts, "unshare --mount");
  if (facts.namespace_of(root, "user") == 0 || facts.has_our_namespace(root, "user")) return;
  if (maps_no_one(root, "uid_map") || maps_no_one(root, "gid_map"))
    out.add(root, kNoUsers, "no user is mapped");
  else if (pids == facts.our_namespace("pid"))
    out.add(root, kOwnUsers, "unshare --user");
}

void probe_namespaces_of_threads(Facts& facts, Pid pid, Signs& out) {
  for (const Tid thread : facts.threads(pid)) {
    if (thread.value == pid.value) continue;  // those of the process are its own
    for (const char* kind : kOfThreads) {
      const ino_t own = facts.namespace_of(pid, kind);
      const ino_t its = namespace_of_thread(pid, thread, kind);
      if (own != 0 && its != 0 && its != own)
        out.add(pid, kOfThread, fmt::format("{} of thread {}", kind, thread.value));
    }
  }
}

}  // namespace

void probe_namespaces(Facts& facts, const Processes& processes, const CriuOptions& options,
                      Signs& out) {
  const Pid root = processes.front().pid;
  probe_root(facts, root, options, out);
  for (const proc::ProcessInfo& info : processes) {
    for (const char* kind : kOfRoot) {
      const ino_t its = facts.namespace_of(info.pid, kind);
      const ino_t of_root = facts.namespace_of(root, kind);
      if (its != 0 && of_root != 0 && its != of_root && its != facts.our_namespace(kind))
        out.add(info.pid, kNested, kind);
    }
    // A network namespace is restored below a root that has one of its own.
    for (const char* kind : {"mnt", "net"}) {
      const ino_t its = facts.namespace_of(info.pid, kind);
      const ino_t of_root = facts.namespace_of(root, kind);
      const bool is_nested_network =
          std::string_view(kind) == "net" && of_root != facts.our_namespace(kind);
      if (its != 0 && of_root != 0 && its != of_root && !is_nested_network)
        out.add(info.pid, kOwnPlace, kind);
    }
    const ino_t time = facts.namespace_of(info.pid, "time");
    const ino_t for_children = facts.namespace_of(info.pid, "time_for_children");
    if (time != 0 && for_children != 0 && time != for_children)
      out.add(info.pid, kTimeForChildren, "unshare --time");
    if (has_numbers_for_children(facts, info.pid))
      out.add(info.pid, kNumbersForChildren, "unshare --pid");
    probe_namespaces_of_threads(facts, info.pid, out);
  }
}

void probe_cgroups(Facts& facts, const Processes& processes, const CriuOptions& options,
                   Signs& out) {
  if (options.cgroups != CgroupMode::kIgnore) return;
  const auto cgroups_in = [](const std::string& folder) {
    return read_file(AT_FDCWD, folder + "/cgroup").value_or("");
  };
  const Pid root = processes.front().pid;
  if (facts.namespace_of(root, "cgroup") != 0 && !facts.has_our_namespace(root, "cgroup"))
    out.add(root, kOwnCgroups, "unshare --cgroup");
  const std::string of_root = cgroups_in(fmt::format("/proc/{}", root.value));
  for (const proc::ProcessInfo& info : processes) {
    const std::string own = fmt::format("/proc/{}", info.pid.value);
    const std::string its = cgroups_in(own);
    if (const auto other = other_cgroup(its, of_root)) out.add(info.pid, kCgroup, *other);
    for (const Tid thread : facts.threads(info.pid)) {
      if (facts.is_over()) return;
      if (thread.value == info.pid.value) continue;
      const std::string of_thread = cgroups_in(fmt::format("{}/task/{}", own, thread.value));
      if (const auto other = other_cgroup(of_thread, its))
        out.add(info.pid, kCgroupOfThreads, fmt::format("{} of thread {}", *other, thread.value));
    }
  }
}

void probe_namespace_files(Facts& facts, const Processes& processes, Signs& out) {
  constexpr std::array<const char*, 7> kKinds = {"net", "mnt",  "pid",   "uts",
                                                 "ipc", "user", "cgroup"};
  std::set<ino_t> known;
  for (const char* kind : kKinds) {
    known.insert(facts.our_namespace(kind));
    for (const proc::ProcessInfo& info : processes)
      known.insert(facts.namespace_of(info.pid, kind));
  }
  for (const proc::ProcessInfo& info : processes) {
    const auto files = facts.open_files(info.pid);
    if (!files) continue;
    for (const proc::OpenFile& file : *files) {
      if (facts.is_over()) return;
      const std::size_t at = file.path.find(":[");
      const bool is_one = at != std::string::npos &&
                          std::any_of(kKinds.begin(), kKinds.end(), [&](const char* kind) {
                            return file.path.compare(0, at, kind) == 0;
                          });
      if (!is_one) continue;
      ino_t inode = 0;
      std::from_chars(file.path.data() + at + 2, file.path.data() + file.path.size(), inode);
      if (!known.contains(inode))
        out.add(info.pid, kFile, fmt::format("{} (descriptor {})", file.path, file.descriptor));
    }
  }
}

}  // namespace stasis::doctor
