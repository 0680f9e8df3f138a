// Threads: filters of their system calls, those that outlive the first of their process, how they
// are scheduled, and what they have that their process has not.
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/kcmp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/address_space.h"
#include "proc/thread_state.h"

namespace stasis::doctor {
namespace {

// CRIU sets its code free of the target's filters (PTRACE_O_SUSPEND_SECCOMP), filters or not; the
// kernel grants that to no process that is under one itself (kernel/ptrace.c).
constexpr Kind kOurs{"seccomp", Severity::kRed,
                     "cannot be dumped from here, because this stasis runs under a seccomp filter",
                     "run stasis outside of the container, or start that one without a filter "
                     "(--security-opt seccomp=unconfined, --privileged)"};
constexpr Kind kTheirs{"seccomp", Severity::kRed,
                       "runs under a seccomp filter, which CRIU may not read without CAP_SYS_ADMIN "
                       "in the first user namespace",
                       "run as root, or start the program without the filter"};
constexpr Kind kZombie{"zombie-leader", Severity::kRed,
                       "has threads and no first one any more, which CRIU cannot dump",
                       "wait until its threads have ended, or let its first thread wait for them"};

// CRIU 4.2.1 dumps the policy's number alone, and its restore fails (cr-restore.c,
// validate_sched_parm()), when the program has ended.
constexpr Kind kScheduler{"scheduler", Severity::kRed,
                          "has threads under a scheduler that CRIU cannot restore",
                          "let them go back to another one before the dump (chrt --other --pid 0 "
                          "THREAD), or do without it in the program"};
// CRIU asks the first thread alone, and restores all with what that has.
constexpr Kind kOwnFiles{"thread-files", Severity::kRed,
                         "has threads with descriptors of their own (CLONE_FILES, unshare), which "
                         "a restore would take from them",
                         "let them be processes of their own"};
constexpr Kind kOwnDirectory{"thread-directory", Severity::kRed,
                             "has threads with a directory, root and umask of their own (CLONE_FS, "
                             "unshare), which a restore would take from them",
                             "let them be processes of their own, or use openat()"};

// CRIU says "Can't make VM id" and "Can't make FS id", and no more.
constexpr Kind kSharedMemory{"process-memory", Severity::kRed,
                             "shares its memory with its parent and is no thread of it (CLONE_VM), "
                             "which CRIU cannot dump",
                             "let it be a thread, or a process of its own (fork)"};
constexpr Kind kSharedDirectory{"process-directory", Severity::kRed,
                                "shares its directory, root and umask with its parent and is no "
                                "thread of it (CLONE_FS), which CRIU cannot dump",
                                "let it be a thread, or a process of its own (fork)"};

// CRIU clones all of them with SIGCHLD.
constexpr Kind kExitSignal{"exit-signal", Severity::kYellow,
                           "has an exit signal other than SIGCHLD, or none (clone); a restored "
                           "process has SIGCHLD",
                           "start it with SIGCHLD as its signal, or have its parent wait with "
                           "__WALL and take SIGCHLD as well"};

// CRIU makes all of them by the first one.
constexpr Kind kThreadsChild{
    "thread-child", Severity::kYellow,
    "has children that another of its threads than the first has made; a restored process's first "
    "thread has made them all: another waits for none by __WNOTHREAD, and a signal at the parent's "
    "end (PR_SET_PDEATHSIG) comes at the end of the first thread",
    "let the first thread make the children, or do without __WNOTHREAD and PR_SET_PDEATHSIG"};

// CRIU ends it once more by the same signal, which leaves no core then.
constexpr Kind kCore{"child-core", Severity::kYellow,
                     "has children that have ended with a core and that it has not waited for; "
                     "after a restore wait() says that the signal has ended them without one",
                     "wait for them before the dump"};

constexpr int kFiltered = 2;  // SECCOMP_MODE_FILTER

bool is_filtered(Facts& facts, Pid pid) {
  for (const Tid thread : facts.threads(pid)) {
    const auto status = facts.procfs().thread_status(pid, thread);
    if (status && status->seccomp == kFiltered) return true;
  }
  return false;
}

// Empty for those that CRIU restores.
std::string scheduler_of(Tid thread) {
  constexpr std::uint32_t kDeadline = 6;  // SCHED_DEADLINE and SCHED_EXT of linux/sched.h
  constexpr std::uint32_t kExtensible = 7;
  const auto now = proc::scheduling(thread);
  if (!now) return {};
  switch (now->policy) {
    case SCHED_OTHER:
    case SCHED_FIFO:
    case SCHED_RR:
    case SCHED_BATCH:
    case SCHED_IDLE:
      return {};
    case kDeadline:
      return "SCHED_DEADLINE";
    case kExtensible:
      return "SCHED_EXT";
    default:
      return fmt::format("policy {}", now->policy);
  }
}

// Do both have the same? Also where the kernel does not tell.
bool share(int what, Pid process, Tid thread) {
  return ::syscall(SYS_kcmp, process.value, thread.value, what, 0, 0) <= 0;
}

std::vector<int> children_of(Pid process, Tid thread) {
  const auto text =
      read_file(AT_FDCWD, fmt::format("/proc/{}/task/{}/children", process.value, thread.value));
  std::istringstream numbers(text.value_or(""));
  return {std::istream_iterator<int>(numbers), std::istream_iterator<int>()};
}

bool share_directory_surely(Pid one, Pid other) {
  return ::syscall(SYS_kcmp, one.value, other.value, KCMP_FS, 0, 0) == 0;
}

}  // namespace

void probe_shared_processes(const Processes& processes, Signs& out) {
  constexpr int kMoreLooks = 4;
  constexpr std::chrono::milliseconds kBetween{20};
  std::vector<const proc::ProcessInfo*> sharing;
  for (const proc::ProcessInfo& info : processes) {
    if (&info == &processes.front() || info.has_ended()) continue;
    if (share_directory_surely(info.pid, info.parent))
      out.add(info.pid, kSharedDirectory, fmt::format("process {}", info.parent.value));
    if (proc::share_address_space(info.pid, info.parent)) sharing.push_back(&info);
  }
  // Not only from its vfork(2) to its execve(2). All at once: a tree can have thousands.
  for (int look = 0; look < kMoreLooks && !sharing.empty(); ++look) {
    std::this_thread::sleep_for(kBetween);
    std::erase_if(sharing, [](const proc::ProcessInfo* info) {
      return !proc::share_address_space(info->pid, info->parent);
    });
  }
  for (const proc::ProcessInfo* info : sharing)
    out.add(info->pid, kSharedMemory, fmt::format("process {}", info->parent.value));
}

void probe_threads(Facts& facts, const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    for (const Tid thread : facts.threads(info.pid)) {
      const std::string named = fmt::format("thread {}", thread.value);
      if (const std::string scheduler = scheduler_of(thread); !scheduler.empty())
        out.add(info.pid, kScheduler, fmt::format("{} ({})", scheduler, named));
      if (!share(KCMP_FILES, info.pid, thread)) out.add(info.pid, kOwnFiles, named);
      if (!share(KCMP_FS, info.pid, thread)) out.add(info.pid, kOwnDirectory, named);
    }
  }
}

void probe_exit_signals(const Processes& all_processes, Signs& out) {
  for (const proc::ProcessInfo& info : all_processes) {
    const bool of_another = &info == &all_processes.front() || info.has_ended();
    if (of_another || info.exit_signal == SIGCHLD) continue;
    out.add(info.pid, kExitSignal, fmt::format("signal {}", info.exit_signal));
  }
}

void probe_children(Facts& facts, const Processes& all_processes, Signs& out) {
  std::map<int, std::set<int>> children;
  for (const proc::ProcessInfo& info : all_processes) {
    children[info.parent.value].insert(info.pid.value);
    if (info.has_ended() && WCOREDUMP(info.exit_code)) {
      out.add(info.parent, kCore,
              fmt::format("process {} ({}), signal {}", info.pid.value, info.comm,
                          WTERMSIG(info.exit_code)));
    }
  }
  for (const proc::ProcessInfo& info : all_processes) {
    const auto own = children.find(info.pid.value);
    if (info.has_ended() || own == children.end()) continue;
    for (const Tid thread : facts.threads(info.pid)) {
      if (thread.value == info.pid.value) continue;
      for (const int child : children_of(info.pid, thread)) {
        if (own->second.contains(child))
          out.add(info.pid, kThreadsChild,
                  fmt::format("process {} of thread {}", child, thread.value));
      }
    }
  }
}

void probe_seccomp(Facts& facts, const Processes& processes, const CriuOptions& options,
                   Signs& out) {
  const proc::ProcFs& procfs = facts.procfs();
  const Pid self{static_cast<int>(::getpid())};
  const auto ours = procfs.thread_status(self, Tid{self.value});
  if (!options.unprivileged && ours && ours->seccomp != 0) {
    out.add(processes.front().pid, kOurs, fmt::format("process {}", self.value));
    return;
  }
  const auto capabilities = procfs.effective_capabilities();
  const bool may = !capabilities || (*capabilities >> CAP_SYS_ADMIN & 1) != 0;
  if (may && !procfs.in_own_user_namespace()) return;
  for (const proc::ProcessInfo& info : processes) {
    if (is_filtered(facts, info.pid)) out.add(info.pid, kTheirs, "mode 2");
  }
}

void probe_zombies(Facts& facts, const Processes& all_processes, Pid root, Signs& out) {
  for (const proc::ProcessInfo& info : all_processes) {
    const std::size_t threads = info.has_ended() ? facts.threads(info.pid).size() : 0;
    if (threads > 1) {
      out.add(root, kZombie,
              fmt::format("process {} ({}), {} threads", info.pid.value, info.comm, threads - 1));
    }
  }
}

}  // namespace stasis::doctor
