// Threads: filters of their system calls, and those that outlive the first of their process.
#include <linux/capability.h>
#include <unistd.h>

#include <fmt/format.h>

#include "doctor/undumpable_parts.h"

namespace stasis::doctor {
namespace {

// CRIU sets its code free of the target's filters (PTRACE_O_SUSPEND_SECCOMP), filters or not; the
// kernel grants that to nobody who is under one himself (kernel/ptrace.c).
constexpr Kind kOurs{"seccomp", Light::kRed,
                     "cannot be dumped from here, because this stasis runs under a seccomp filter",
                     "run stasis outside of the container, or start that one without a filter "
                     "(--security-opt seccomp=unconfined, --privileged)"};
constexpr Kind kTheirs{"seccomp", Light::kRed,
                       "runs under a seccomp filter, which CRIU may not read without CAP_SYS_ADMIN "
                       "in the first user namespace",
                       "run as root, or start the program without the filter"};
constexpr Kind kZombie{"zombie-leader", Light::kRed,
                       "has threads and no first one any more, which CRIU cannot dump",
                       "wait until its threads have ended, or let its first thread wait for them"};

constexpr int kFiltered = 2;  // SECCOMP_MODE_FILTER

bool is_filtered(const proc::ProcFs& procfs, Pid pid) {
  for (const Tid thread : procfs.threads(pid)) {
    const auto status = procfs.thread_status(pid, thread);
    if (status && status->seccomp == kFiltered) return true;
  }
  return false;
}

}  // namespace

void look_at_seccomp(const proc::ProcFs& procfs, const Processes& processes,
                     const CriuOptions& options, Signs& out) {
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
    if (is_filtered(procfs, info.pid)) out.add(info.pid, kTheirs, "mode 2");
  }
}

void look_at_zombies(const proc::ProcFs& procfs, const Processes& everybody, Pid root, Signs& out) {
  for (const proc::ProcessInfo& info : everybody) {
    const std::size_t threads = info.state == 'Z' ? procfs.threads(info.pid).size() : 0;
    if (threads > 1) {
      out.add(root, kZombie,
              fmt::format("process {} ({}), {} threads", info.pid.value, info.comm, threads - 1));
    }
  }
}

}  // namespace stasis::doctor
