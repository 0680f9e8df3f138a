// What the kernel is made of, and what it lets this user do.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"
#include "criu/criu.h"
#include "doctor/machine_parts.h"
#include "proc/capabilities.h"
#include "proc/cgroup.h"
#include "proc/proc_mount.h"
#include "proc/procfs.h"

namespace stasis::doctor {
namespace {

// Of linux/capability.h; the last is not in the headers of older kernels.
enum Capability : unsigned {
  kSysPtrace = 19,
  kSysAdmin = 21,
  kSysResource = 24,
  kCheckpointRestore = 40,
};

void probe_yama(const KernelFolders& folders, bool may_trace_all, Obstacles& out) {
  const std::string path = folders.proc + "/sys/kernel/yama/ptrace_scope";
  const auto scope = read_number(path);
  if (!scope || *scope == 0) {
    out.push_back(green("yama", scope ? "kernel.yama.ptrace_scope is 0" : "no yama"));
  } else if (*scope >= 3) {
    out.push_back(red("yama",
                      fmt::format("kernel.yama.ptrace_scope is {}: no process may be traced, not "
                                  "even by root",
                                  *scope),
                      "it can only be changed at boot: set it to 0 or 1 in /etc/sysctl.d and "
                      "reboot"));
  } else if (may_trace_all) {
    out.push_back(green("yama", fmt::format("kernel.yama.ptrace_scope is {}, and CAP_SYS_PTRACE "
                                            "passes it",
                                            *scope)));
  } else {
    out.push_back(
        yellow("yama",
               fmt::format("kernel.yama.ptrace_scope is {}: without CAP_SYS_PTRACE {}", *scope,
                           *scope == 1 ? "only one's own children can be suspended"
                                       : "no process can be suspended"),
               "run as root, or `sysctl kernel.yama.ptrace_scope=0`"));
  }
}

// CRIU asks the kernel to suspend the target's filters, whether it has any or not, and that grants
// it to no process that is under one itself: "suspending seccomp failed" (CRIU 4.2.1).
void probe_seccomp_here(const KernelFolders& folders, Obstacles& out) {
  const auto status = read_file(AT_FDCWD, folders.proc + "/self/status");
  constexpr std::string_view kKey = "\nSeccomp:\t";
  const std::size_t at = status ? status->find(kKey) : std::string::npos;
  if (at == std::string::npos) return;
  const char mode = (*status)[at + kKey.size()];
  if (mode == '0') {
    out.push_back(green("seccomp", "stasis runs under no seccomp filter"));
    return;
  }
  out.push_back(
      red("seccomp",
          fmt::format("stasis runs under a seccomp filter (mode {}): CRIU can dump nothing "
                      "from here; suspend and resume work",
                      mode),
          "run it outside of the container, or start that one without a filter "
          "(--security-opt seccomp=unconfined, --privileged)"));
}

// CONFIG_ names that the text sets to y or m.
bool is_set(std::string_view config, std::string_view name) {
  for (const char value : {'y', 'm'}) {
    const std::string line = fmt::format("{}={}\n", name, value);
    if (config.starts_with(line) || config.find("\n" + line) != std::string_view::npos) return true;
  }
  return false;
}

// Processes and threads of the whole machine: the fourth word of "0.10 0.20 0.30 2/345 12345".
std::optional<std::uint64_t> threads_running(const KernelFolders& folders) {
  const auto text = read_file(AT_FDCWD, folders.proc + "/loadavg");
  const std::size_t slash = text ? text->find('/') : std::string::npos;
  if (slash == std::string::npos) return std::nullopt;
  std::uint64_t value = 0;
  const char* const end = text->data() + text->size();
  if (std::from_chars(text->data() + slash + 1, end, value).ec != std::errc()) return std::nullopt;
  return value;
}

void probe_sysctls(const KernelFolders& folders, Obstacles& out) {
  // CRIU moves memory through pipes as large as it may make them.
  constexpr std::uint64_t kPipe = 1U << 20;
  if (const auto size = read_number(folders.proc + "/sys/fs/pipe-max-size")) {
    const std::string what = fmt::format("pipes hold up to {}", format_bytes(*size));
    out.push_back(*size >= kPipe
                      ? green("limit-pipe-size", what)
                      : yellow("limit-pipe-size",
                               what + ": dumps are slower, and programs with larger "
                                      "pipes cannot be restored without CAP_SYS_RESOURCE",
                               "sysctl fs.pipe-max-size=1048576"));
  }
  constexpr std::uint64_t kSmallest = 32768;
  if (const auto most = read_number(folders.proc + "/sys/kernel/pid_max")) {
    std::string what = fmt::format("process numbers go up to {}", *most);
    if (const auto threads = threads_running(folders))
      what += fmt::format(", {} are in use", *threads);
    out.push_back(*most > kSmallest ? green("limit-process-numbers", what)
                                    : yellow("limit-process-numbers",
                                             what + ": other programs soon get the numbers of a "
                                                    "dumped job, and its restore is refused",
                                             "sysctl kernel.pid_max=4194304"));
  }
}

// How many more processes and threads this user's cgroup and the kernel leave room for.
void probe_room_for_processes(const KernelFolders& folders, Obstacles& out) {
  // A Python program with PyTorch and CUDA has some hundred threads on a host of many processors.
  constexpr std::uint64_t kJob = 256;
  constexpr ObstacleId kId = "limit-processes";
  const auto group = proc::tightest_pids_cgroup(Pid{static_cast<int>(::getpid())}, folders.proc);
  const auto most = read_number(folders.proc + "/sys/kernel/threads-max");
  const auto threads = threads_running(folders);
  std::optional<std::uint64_t> room;
  if (most && threads) room = *most - std::min(*most, *threads);
  if (group && (!room || group->room() < *room)) {
    const std::string what =
        fmt::format("room for {} more processes and threads within the limit of {} ({})",
                    group->room(), group->directory, group->limit);
    out.push_back(group->room() >= kJob
                      ? green(kId, what)
                      : yellow(kId, what + ": a restore of a larger job fails",
                               fmt::format("restore elsewhere, or raise {}/pids.max (systemd: "
                                           "TasksMax; containers: --pids-limit)",
                                           group->directory)));
  } else if (room) {
    const std::string what = fmt::format("room for {} more processes and threads", *room);
    out.push_back(*room >= kJob ? green(kId, what)
                                : yellow(kId, what + ": a restore of a larger job fails",
                                         "end what is not needed, or raise kernel.threads-max"));
  }
}

std::string limit_text(rlim_t value) {
  return value == RLIM_INFINITY ? "unlimited" : fmt::format("{}", value);
}

}  // namespace

void probe_proc(Obstacles& out) {
  constexpr ObstacleId kId = "proc";
  if (const auto mounted = proc::check_proc_mount(); !mounted)
    out.push_back(from_error(Severity::kRed, kId, mounted.error()));
  else if (proc::proc_hides_others())
    out.push_back(yellow(kId,
                         "/proc shows this user no processes of others (hidepid): neither `stasis "
                         "ps` nor the checks see them, MPS of another user among them",
                         "run as root, or join the group that may see them (gid= of the mount)"));
  else
    out.push_back(green(kId, "/proc is that of this PID namespace, and shows all processes"));
}

void probe_permissions(const KernelFolders& folders, Obstacles& out) {
  constexpr ObstacleId kId = "permissions";
  const auto capabilities = proc::ProcFs(folders.proc).effective_capabilities();
  if (!capabilities) {
    out.push_back(yellow(
        kId, fmt::format("{}/self/status does not tell this process's capabilities", folders.proc),
        "see that /proc is mounted"));
    return;
  }
  const auto has = [&](Capability which) { return (*capabilities >> which & 1) != 0; };
  const bool is_root = ::geteuid() == 0;
  const std::string who = is_root ? "root" : fmt::format("user {}", ::geteuid());
  std::vector<std::string> missing;
  const auto miss = [&](const std::string& names, const char* consequence) {
    missing.push_back(fmt::format("{} {}{}: {}", missing.empty() ? who + " lacks" : "it lacks",
                                  names, missing.empty() ? " here" : "", consequence));
  };
  if (!has(kSysPtrace)) miss("CAP_SYS_PTRACE", "it reaches no programs of other users");
  if (!has(kSysResource))
    miss("CAP_SYS_RESOURCE", "it cannot dump other users' programs, and dumps are slower");
  if (const auto lacking = Criu::capabilities_to_restore() & ~*capabilities; lacking != 0)
    miss(proc::capability_names(lacking), "no restores, no jobs");
  if (!has(kSysAdmin) && !has(kCheckpointRestore)) {
    // Short, because the doctor's first lines have it: what else is missing matters to none then.
    out.push_back(red(
        kId,
        fmt::format("{} may not dump or restore: neither CAP_SYS_ADMIN nor "
                    "CAP_CHECKPOINT_RESTORE",
                    who),
        is_root
            ? "add one of them: in a container, start it with --privileged"
            : "run as root (sudo); in a container, start it with --privileged; without root, a job "
              "can be saved in a user namespace: `STASIS_STATE_DIR=/tmp/stasis-$(id -u) unshare "
              "--user --map-root-user stasis run --images-dir DIR -- COMMAND`"));
  } else if (!missing.empty()) {
    constexpr const char* kAdd =
        "add these capabilities, where what started this shell takes them away: a container "
        "(--cap-add), a unit of systemd (CapabilityBoundingSet)";
    out.push_back(yellow(kId, fmt::to_string(fmt::join(missing, "; ")),
                         is_root ? kAdd : "run as root; in a container, add these capabilities"));
  } else {
    out.push_back(green(kId, who + " with all capabilities that are needed"));
  }
  probe_yama(folders, has(kSysPtrace), out);
  probe_seccomp_here(folders, out);
}

void probe_kernel(const KernelFolders& folders, const std::string& release, Obstacles& out) {
  const auto config = read_file(AT_FDCWD, fmt::format("{}/config-{}", folders.boot, release));
  if (!config) return;
  if (!is_set(*config, "CONFIG_CHECKPOINT_RESTORE")) {
    out.push_back(red("kernel",
                      fmt::format("Linux {} is built without CONFIG_CHECKPOINT_RESTORE", release),
                      "boot a kernel with it, as distributions have"));
    return;
  }
  if (!is_set(*config, "CONFIG_MEM_SOFT_DIRTY")) {
    out.push_back(yellow("kernel",
                         fmt::format("Linux {} is built without CONFIG_MEM_SOFT_DIRTY: no `criu "
                                     "pre-dump`; stasis does not need it",
                                     release),
                         "boot a kernel with it if you use `criu pre-dump`"));
    return;
  }
  out.push_back(green("kernel", fmt::format("Linux {} with all that CRIU can use", release)));
}

void probe_limits(const KernelFolders& folders, Obstacles& out) {
  rlimit limit{};
  constexpr rlim_t kFiles = 1024;
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    const std::string what = fmt::format("up to {} open files (hard limit {})",
                                         limit_text(limit.rlim_cur), limit_text(limit.rlim_max));
    out.push_back(limit.rlim_cur >= kFiles
                      ? green("limit-open-files", what)
                      : yellow("limit-open-files", what + ": too few for a job of many processes",
                               "ulimit -n 1024"));
  }
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    out.push_back(
        green("limit-locked-memory",
              limit.rlim_cur == RLIM_INFINITY
                  ? std::string("any amount of memory may be locked")
                  : fmt::format("up to {} of memory may be locked", format_bytes(limit.rlim_cur))));
  }
  probe_sysctls(folders, out);
  probe_room_for_processes(folders, out);
}

void probe_clock(const KernelFolders& folders, Obstacles& out) {
  constexpr ObstacleId kId = "clock";
  if (::access((folders.proc + "/self/ns/time").c_str(), F_OK) == 0) {
    out.push_back(green(kId,
                        "programs keep their monotonic clock over a restore (time "
                        "namespaces)"));
    return;
  }
  out.push_back(
      yellow(kId,
             "the kernel has no time namespaces: after a restore on another machine, or "
             "after a reboot, the monotonic clock of a program jumps, and its timers with "
             "it",
             "boot a kernel with CONFIG_TIME_NS (5.6 and newer)"));
}

}  // namespace stasis::doctor
