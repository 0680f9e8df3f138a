#include "attach/seccomp_filter.h"

#include <fcntl.h>
#include <linux/prctl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <span>
#include <string_view>

#include <fmt/format.h>

#include "attach/c_library.h"
#include "proc/bounded_seize.h"
#include "proc/procfs.h"
#include "proc/seccomp_filters.h"
#include "proc/stopped_threads.h"

namespace stasis::attach {
namespace {

constexpr std::uint64_t kThreadFlags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND |
                                       CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS |
                                       CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;

// What our threads and, in our name, the C library and the driver call; where an error does no
// harm, the library does without.
struct Call {
  int number;
  std::array<std::uint64_t, 3> arguments;
  bool may_fail;
};
constexpr Call kCalls[] = {
    {SYS_clone, {kThreadFlags, 0, 0}, false},
    {SYS_clone3, {0, 88, 0}, true},
    {SYS_mmap, {0, 1 << 20, PROT_NONE}, false},
    {SYS_mmap, {0, 1 << 20, PROT_READ | PROT_WRITE}, false},
    {SYS_mprotect, {0, 1 << 20, PROT_READ | PROT_WRITE}, false},
    {SYS_munmap, {0, 1 << 20, 0}, false},
    {SYS_madvise, {0, 1 << 20, MADV_DONTNEED}, true},
    {SYS_brk, {0, 0, 0}, true},
    {SYS_futex, {0, 128, 0}, false},
    {SYS_futex, {0, 129, 1}, false},
    {SYS_rt_sigprocmask, {2, 0, 0}, false},
    {SYS_set_robust_list, {0, 24, 0}, true},
    {SYS_rseq, {0, kRseqSize, 0}, true},
    {SYS_prctl, {PR_SET_NAME, 0, 0}, true},
    {SYS_gettid, {0, 0, 0}, false},
    {SYS_getpid, {0, 0, 0}, true},
    {SYS_sched_yield, {0, 0, 0}, true},
    {SYS_sched_getaffinity, {0, 128, 0}, true},
    {SYS_clock_gettime, {1, 0, 0}, true},
    {SYS_getrandom, {0, 8, 0}, true},
    {SYS_close, {3, 0, 0}, true},
    {SYS_ioctl, {3, 0, 0}, true},
    {SYS_exit, {0, 0, 0}, false},
};

// The same where a library of ours is loaded: of the loader, and of the agent as long as it is
// there. Those of its sockets, which serve CUDA IPC, are the program's own as well.
constexpr Call kLibraryCalls[] = {
    // By its name the tool knows an agent's thread, which works on while the program stands still.
    {SYS_prctl, {PR_SET_NAME, 0, 0}, false},
    {SYS_memfd_create, {0, 1, 0}, false},
    {SYS_openat, {static_cast<std::uint64_t>(AT_FDCWD), 0, O_RDONLY | O_CLOEXEC}, false},
    {SYS_read, {3, 0, 832}, false},
    {SYS_pread64, {3, 0, 832}, true},
    {SYS_fstat, {3, 0, 0}, true},
    {SYS_newfstatat, {3, 0, 0}, true},
    {SYS_lseek, {3, 0, 0}, true},
    {SYS_write, {3, 0, 8}, true},
    {SYS_mmap, {0, 1 << 20, PROT_READ | PROT_EXEC}, false},
    {SYS_mprotect, {0, 4096, PROT_READ | PROT_EXEC}, false},
    {SYS_mremap, {0, 4096, 8192}, true},
    {SYS_ftruncate, {3, 4096, 0}, true},
    {SYS_fcntl, {3, F_DUPFD_CLOEXEC, 3}, true},
    {SYS_fcntl, {3, F_ADD_SEALS, F_SEAL_SHRINK}, true},
    {SYS_fchmod, {3, 0600, 0}, true},
    {SYS_flock, {3, 2, 0}, true},
    {SYS_readlink, {0, 0, 4096}, true},
    {SYS_getdents64, {3, 0, 32768}, true},
    {SYS_prlimit64, {0, RLIMIT_NOFILE, 0}, true},
    {SYS_eventfd2, {0, O_CLOEXEC, 0}, true},
    {SYS_poll, {0, 1, 0}, true},
    {SYS_membarrier, {8, 0, 0}, true},
    {SYS_geteuid, {0, 0, 0}, true},
    {SYS_clock_nanosleep, {0, 0, 0}, true},
};

tl::unexpected<Error> filtered(Pid pid, std::string_view why) {
  return fail(
      ErrorCode::kNotSupported,
      fmt::format("the tool makes no calls inside process {}: its system calls are filtered "
                  "(seccomp), and {}",
                  pid.value, why));
}

Result<void> check_filter(Pid pid, std::span<const sock_filter> program,
                          std::span<const Call> calls) {
  for (const Call& one : calls) {
    const auto answer = proc::run_filter(program, proc::call_of(one.number, one.arguments));
    if (!answer) return filtered(pid, "what the filter does cannot be told");
    const std::uint32_t action = *answer & SECCOMP_RET_ACTION_FULL;
    if (action == SECCOMP_RET_ALLOW || action == SECCOMP_RET_LOG) continue;
    // glibc makes a thread by clone() only where clone3() is not there.
    const bool falls_back = one.number != SYS_clone3 || (*answer & SECCOMP_RET_DATA) == ENOSYS;
    if (action == SECCOMP_RET_ERRNO && one.may_fail && falls_back) continue;
    return filtered(pid, fmt::format("the filter does not let system call {} of a thread of the "
                                     "tool pass",
                                     one.number));
  }
  return {};
}

}  // namespace

Result<void> check_filters(Pid pid, Tid stopped, CallsInside calls) {
  const auto status = proc::ProcFs().thread_status(pid, stopped);
  if (!status || status->seccomp == 0) return {};
  if (status->seccomp != 2) return filtered(pid, "it may make none but read and write");
  const auto filters = proc::filters_of(stopped);
  if (!filters)
    return filtered(pid, "the filter may not be read: run as root, outside of such a filter");
  for (const proc::SystemCallFilter& filter : *filters) {
    STASIS_TRY(check_filter(pid, filter, kCalls));
    if (calls == CallsInside::kOfLibrary) STASIS_TRY(check_filter(pid, filter, kLibraryCalls));
  }
  return {};
}

Result<void> check_filters_of_all(const proc::AddressSpace& space, CallsInside calls) {
  const Pid pid = space.pid();
  const proc::ProcFs procfs;
  for (const Tid thread : procfs.threads(pid)) {
    const auto status = procfs.thread_status(pid, thread);
    if (!status || status->seccomp == 0) continue;
    STASIS_TRY(trace_on_own_thread([&]() -> Result<void> {
      STASIS_TRY_ASSIGN(const auto stopped, proc::StoppedThreads::stop(space, thread));
      return stopped.threads().empty() ? Result<void>() : check_filters(pid, thread, calls);
    }));
  }
  return {};
}

}  // namespace stasis::attach
