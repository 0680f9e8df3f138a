#include "attach/seccomp_filter.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/prctl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "attach/c_library.h"
#include "proc/procfs.h"

namespace stasis::attach {
namespace {

constexpr int kGetFilter = 0x420c;  // PTRACE_SECCOMP_GET_FILTER of linux/ptrace.h
constexpr std::size_t kMostFilters = 64;
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
    // The kernel makes it of a call that was interrupted by the stop of a thread.
    {SYS_restart_syscall, {0, 0, 0}, true},
};

// The same where a library of ours is loaded: of the loader, and of the agent as long as it is
// there. Those of its sockets, which serve CUDA IPC, are the program's own as well.
constexpr Call kLibraryCalls[] = {
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

// Of an arithmetic or a jump instruction: the constant, or the index register.
struct Machine {
  std::uint32_t accumulator = 0;
  std::uint32_t index = 0;
  std::array<std::uint32_t, BPF_MEMWORDS> memory{};

  bool arithmetic(const sock_filter& one) {
    const std::uint32_t by = BPF_SRC(one.code) == BPF_X ? index : one.k;
    switch (BPF_OP(one.code)) {
      case BPF_ADD:
        accumulator += by;
        return true;
      case BPF_SUB:
        accumulator -= by;
        return true;
      case BPF_MUL:
        accumulator *= by;
        return true;
      case BPF_DIV:
        if (by == 0) return false;
        accumulator /= by;
        return true;
      case BPF_AND:
        accumulator &= by;
        return true;
      case BPF_OR:
        accumulator |= by;
        return true;
      case BPF_XOR:
        accumulator ^= by;
        return true;
      case BPF_LSH:
        accumulator = by < 32 ? accumulator << by : 0;
        return true;
      case BPF_RSH:
        accumulator = by < 32 ? accumulator >> by : 0;
        return true;
      case BPF_NEG:
        accumulator = 0 - accumulator;
        return true;
      default:
        return false;
    }
  }

  // How far to go on.
  std::optional<std::uint32_t> jump(const sock_filter& one) const {
    const std::uint32_t by = BPF_SRC(one.code) == BPF_X ? index : one.k;
    switch (BPF_OP(one.code)) {
      case BPF_JA:
        return one.k;
      case BPF_JEQ:
        return accumulator == by ? one.jt : one.jf;
      case BPF_JGT:
        return accumulator > by ? one.jt : one.jf;
      case BPF_JGE:
        return accumulator >= by ? one.jt : one.jf;
      case BPF_JSET:
        return (accumulator & by) != 0 ? one.jt : one.jf;
      default:
        return std::nullopt;
    }
  }

  bool load(const sock_filter& one, const seccomp_data& call, std::uint32_t& into) const {
    switch (BPF_MODE(one.code)) {
      case BPF_IMM:
        into = one.k;
        return true;
      case BPF_LEN:
        into = sizeof call;
        return true;
      case BPF_MEM:
        if (one.k >= memory.size()) return false;
        into = memory.at(one.k);
        return true;
      case BPF_ABS: {
        const bool of_pointer = one.k + 4 > offsetof(seccomp_data, instruction_pointer) &&
                                one.k < offsetof(seccomp_data, args);
        if (one.k % 4 != 0 || one.k + 4 > sizeof call || of_pointer) return false;
        std::memcpy(&into, reinterpret_cast<const char*>(&call) + one.k, sizeof into);
        return true;
      }
      default:
        return false;
    }
  }
};

tl::unexpected<Error> filtered(Pid pid, std::string_view why) {
  return fail(ErrorCode::kNotSupported,
              fmt::format("process {} is not to be looked into: its system calls are filtered "
                          "(seccomp), and {}",
                          pid.value, why));
}

Result<void> check_filter(Pid pid, std::span<const sock_filter> program,
                          std::span<const Call> calls) {
  for (const Call& one : calls) {
    seccomp_data call{};
    call.nr = one.number;
    call.arch = AUDIT_ARCH_X86_64;
    std::copy(one.arguments.begin(), one.arguments.end(), call.args);
    const auto answer = run_filter(program, call);
    if (!answer) return filtered(pid, "what the filter does cannot be told");
    const std::uint32_t action = *answer & SECCOMP_RET_ACTION_FULL;
    if (action == SECCOMP_RET_ALLOW || action == SECCOMP_RET_LOG) continue;
    if (action == SECCOMP_RET_ERRNO && one.may_fail) continue;
    return filtered(pid, fmt::format("the filter does not let system call {} of a thread of the "
                                     "tool pass",
                                     one.number));
  }
  return {};
}

}  // namespace

std::optional<std::uint32_t> run_filter(std::span<const sock_filter> program,
                                        const seccomp_data& call) {
  Machine machine;
  // It jumps forward only, so it ends.
  for (std::size_t at = 0; at < program.size(); ++at) {
    const sock_filter& one = program[at];
    switch (BPF_CLASS(one.code)) {
      case BPF_LD:
        if (!machine.load(one, call, machine.accumulator)) return std::nullopt;
        break;
      case BPF_LDX:
        if (!machine.load(one, call, machine.index)) return std::nullopt;
        break;
      case BPF_ST:
      case BPF_STX:
        if (one.k >= machine.memory.size()) return std::nullopt;
        machine.memory.at(one.k) =
            BPF_CLASS(one.code) == BPF_ST ? machine.accumulator : machine.index;
        break;
      case BPF_ALU:
        if (!machine.arithmetic(one)) return std::nullopt;
        break;
      case BPF_JMP: {
        const auto distance = machine.jump(one);
        if (!distance || *distance >= program.size()) return std::nullopt;
        at += *distance;
        break;
      }
      case BPF_RET:
        return BPF_RVAL(one.code) == BPF_A ? machine.accumulator : one.k;
      default:  // BPF_MISC
        if (BPF_MISCOP(one.code) == BPF_TAX)
          machine.index = machine.accumulator;
        else
          machine.accumulator = machine.index;
        break;
    }
  }
  return std::nullopt;
}

Result<void> check_filters(Pid pid, Tid stopped, CallsInside calls) {
  const auto status = proc::ProcFs().thread_status(pid, stopped);
  if (!status || status->seccomp == 0) return {};
  if (status->seccomp != 2) return filtered(pid, "it may make none but read and write");
  const auto get = [&](std::size_t index, sock_filter* into) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the request takes a number there
    return ::ptrace(static_cast<__ptrace_request>(kGetFilter), stopped.value,
                    reinterpret_cast<void*>(index), into);
  };
  for (std::size_t index = 0; index < kMostFilters; ++index) {
    const long length = get(index, nullptr);
    if (length < 0 && errno == ENOENT && index > 0) return {};
    if (length <= 0 || length > BPF_MAXINSNS)
      return filtered(pid, "the filter may not be read: run as root, outside of such a filter");
    std::vector<sock_filter> program(static_cast<std::size_t>(length));
    if (get(index, program.data()) != length) return filtered(pid, "the filter cannot be read");
    STASIS_TRY(check_filter(pid, program, kCalls));
    if (calls == CallsInside::kOfLibrary) STASIS_TRY(check_filter(pid, program, kLibraryCalls));
  }
  return filtered(pid, "there are more filters than are looked at");
}

}  // namespace stasis::attach
