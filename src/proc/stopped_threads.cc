// Long because each way out of a stop has to put back what the others have set.
#include "proc/stopped_threads.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <thread>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/scope_guard.h"
#include "proc/bounded_seize.h"
#include "proc/interrupted_call.h"
#include "proc/procfs.h"
#include "proc/ptrace_status.h"
#include "proc/seccomp_filters.h"

namespace stasis::proc {
namespace {

// Threads may be made by threads that are not stopped yet; each pass leaves fewer of those.
constexpr int kPasses = 100;
// A thread stops within microseconds, but one in uninterruptible sleep (disk, vfork) does not: a
// write to a disk that others keep busy takes seconds (seen on ext4). The program stands still for
// it, all threads together for so long at most.
constexpr std::chrono::seconds kStopLimit{10};
// So many polls without a pause at first: a thread that runs stops within microseconds, and
// comes back from most system calls.
constexpr int kEagerLooks = 200;
// Marks the stops at a system call (PTRACE_O_TRACESYSGOOD).
constexpr int kSyscallStop = 0x80;

// <sys/ptrace.h> of Debian 12 has it, with a header of its own that clashes with the kernel's.
struct RseqConfiguration {
  std::uint64_t area = 0;
  std::uint32_t size = 0;
  std::uint32_t signature = 0;
  std::uint32_t flags = 0;
  std::uint32_t pad = 0;
};
constexpr int kGetRseqConfiguration = 0x420f;

// linux/rseq.h
constexpr std::uint64_t kRseqCsOffset = 8;
struct RseqCriticalSection {
  std::uint32_t version = 0;
  std::uint32_t flags = 0;
  std::uint64_t start = 0;
  std::uint64_t length = 0;
  std::uint64_t abort = 0;
};

bool is_kernels_own(const ProcessInfo& thread) {
  // PF_IO_WORKER, PF_USER_WORKER of linux/sched.h
  return (thread.flags & (0x10 | 0x4000)) != 0;
}

// Has the thread ended, or is it one of the kernel's own that work for the process (io_uring)? The
// kernel says "not permitted" of both.
bool cannot_be_traced(Pid pid, Tid thread) {
  const auto info = ProcFs().thread(pid, thread);
  return !info || info->has_ended() || is_kernels_own(*info);
}

// 0 if none has it at this moment.
int tracer_of(Pid pid, Tid thread) {
  const auto status = ProcFs().thread_status(pid, thread);
  return status ? status->tracer : 0;
}

// `tracer` is one that had a thread of it.
Error cannot_stop(Pid pid, int error_number, int tracer) {
  if (error_number == EINTR) return held_by_an_execve(pid);
  if (tracer != 0) {
    return Error{ErrorCode::kBusy,
                 fmt::format("process {} is being traced by process {} (CRIU, or a debugger)",
                             pid.value, tracer),
                 "wait for it to end, or detach it"};
  }
  Error error =
      errno_error(fmt::format("cannot stop the threads of process {}", pid.value), error_number);
  if (error.code == ErrorCode::kNotPermitted) {
    error.remedy = "run as root or with CAP_SYS_PTRACE";
  }
  return error;
}

Error gone(Pid pid) {
  return Error{ErrorCode::kProcessGone,
               fmt::format("process {} ended while its threads were held", pid.value),
               "start the program again, or restore it from an image"};
}

// -1 if unknown.
int processor_of(Pid pid, Tid thread) {
  const auto info = ProcFs().thread(pid, thread);
  return info ? info->processor : -1;
}

// Binds the calling thread to a processor, if it may.
void run_on(int processor) {
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(processor), &set);
  (void)::sched_setaffinity(0, sizeof set, &set);
}

// The kernel rounds sleeps up by 50 us by default.
void sleep_precisely(std::chrono::nanoseconds time) {
  (void)::prctl(PR_SET_TIMERSLACK, 1UL);
  std::this_thread::sleep_for(time);
}

// One request on a stopped thread. ESRCH there means that it was killed.
Result<void> request(Pid pid, int what, Tid thread, void* address, void* data) {
  if (::ptrace(static_cast<__ptrace_request>(what), thread.value, address, data) == 0) return {};
  if (errno == ESRCH) return fail(gone(pid));
  Error error = errno_error(fmt::format("cannot trace thread {} of process {} (request {:#x})",
                                        thread.value, pid.value, what),
                            errno);
  error.remedy =
      fmt::format("where threads are still held, `stasis recover {}` lets them go", pid.value);
  return fail(std::move(error));
}

// Until the tool lets the thread go. The kernel wants CAP_SYS_ADMIN for it; without that, a filter
// that refuses the tool's calls says so in their answer, and a filter that kills for them has to be
// known.
Result<void> lift_filter(Pid pid, Tid thread) {
  constexpr int kStrict = 1;  // SECCOMP_MODE_STRICT of linux/seccomp.h
  const auto options = static_cast<std::uint64_t>(PTRACE_O_TRACESYSGOOD | kSuspendSeccomp);
  if (::ptrace(PTRACE_SETOPTIONS, thread.value, nullptr, as_pointer(options)) == 0) return {};
  const auto status = ProcFs().thread_status(pid, thread);
  if (!status || status->seccomp != kStrict) return {};
  return fail(
      refusal({"seccomp-strict", Severity::kRed, pid,
               fmt::format("thread {} of process {} may make no system call but read and write "
                           "(seccomp), and would be killed for ours",
                           thread.value, pid.value),
               "run as root or with CAP_SYS_ADMIN"}));
}

// linux/ptrace.h, since Linux 6.4.
constexpr int kSetDispatch = 0x4210;
constexpr int kGetDispatch = 0x4211;
struct SystemCallDispatch {
  std::uint64_t mode = 0;  // 0: off
  std::uint64_t selector = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

SystemCallDispatch dispatch_of(Tid thread) {
  SystemCallDispatch out;
  if (::ptrace(static_cast<__ptrace_request>(kGetDispatch), thread.value, as_pointer(sizeof out),
               &out) != 0)
    return {};
  return out;
}

// linux/ptrace.h, since Linux 5.3: what a thread that stops at the entry of a system call is about
// to make.
constexpr int kGetCall = 0x420e;
struct EnteredCall {
  std::uint8_t stop = 0;
  std::array<std::uint8_t, 3> reserved{};
  std::uint32_t interface = 0;
  std::uint64_t instruction = 0;
  std::uint64_t stack = 0;
  std::uint64_t number = 0;
  std::array<std::uint64_t, 6> arguments{};
};
constexpr std::uint8_t kAtEntry = 1;
constexpr std::uint32_t kOf64Bits = 0xc000003e;  // AUDIT_ARCH_X86_64 of linux/audit.h

// The program's other threads can exchange the instruction that the thread was set to, so that it
// makes a call of the program's choice; also one of the 32-bit interface, where the same number is
// another call.
bool is_at_entry_of(Tid thread, std::uint64_t instruction, std::uint64_t number,
                    const std::array<std::uint64_t, 6>& arguments) {
  EnteredCall call;
  if (::ptrace(static_cast<__ptrace_request>(kGetCall), thread.value, as_pointer(sizeof call),
               &call) < static_cast<long>(sizeof call))
    return false;
  return call.stop == kAtEntry && call.interface == kOf64Bits &&
         call.instruction == instruction + kSyscallLength && call.number == number &&
         call.arguments == arguments;
}

// The kernel has a thread that was stopped in a timed wait call restart_syscall when it goes on,
// for which a filter may end the program. Where that cannot be told, it may.
bool may_restart(Pid pid, Tid thread) {
  const auto status = ProcFs().thread_status(pid, thread);
  if (!status || status->seccomp == 0) return true;
  const auto filters = filters_of(thread);
  return filters && let_pass(*filters, call_of(SYS_restart_syscall));
}

bool replaces_memory(std::uint64_t call) { return call == SYS_execve || call == SYS_execveat; }

// A call that was interrupted before it had done anything.
bool is_to_be_made_again(std::int64_t answer) {
  return answer == kRestartSys || answer == kRestartNoIntr || answer == kRestartNoHand;
}

void set_dispatch(Tid thread, SystemCallDispatch dispatch) {
  (void)::ptrace(static_cast<__ptrace_request>(kSetDispatch), thread.value,
                 as_pointer(sizeof dispatch), &dispatch);
}

}  // namespace

bool is_kernels_own(Pid pid, Tid thread) {
  const auto info = ProcFs().thread(pid, thread);
  return info && is_kernels_own(*info);
}

// Before Linux 5.8 a thread that was interrupted in its own code has another negative number there.
bool is_in_system_call(const user_regs_struct& registers) {
  return static_cast<int>(registers.orig_rax) >= 0;
}

void make_call_again(const AddressSpace& space, Tid thread, user_regs_struct& registers) {
  if (!is_in_system_call(registers)) return;
  const auto result = static_cast<std::int64_t>(registers.rax);
  // The kernel itself would let a timed wait (kRestartBlock) end when it was to end first, but that
  // is bound to this very stop. It begins anew with its arguments: those that tell the time left
  // write it there (nanosleep), deadlines stay what they are.
  const bool spurious = result == -EINTR && returns_eintr_after_stop(registers.orig_rax) &&
                        !has_signal(space.pid(), thread);
  if (result != kRestartBlock && !spurious) return;
  registers.rax = static_cast<std::uint64_t>(kRestartNoHand);
  // Or restart_syscall would be made again, which knows nothing in a restored process.
  const auto made = call_made(space, {registers.orig_rax, registers.rip, registers.rdi,
                                      registers.rsi, registers.rdx, registers.r10});
  if (made) registers.orig_rax = *made;
}

void make_calls_again(Pid pid) {
  const auto space = AddressSpace::open(pid);
  if (!space) return;
  for (const Tid thread : ProcFs().threads(pid)) {
    user_regs_struct registers{};
    if (::ptrace(PTRACE_GETREGS, thread.value, nullptr, &registers) != 0) continue;
    const auto before = registers.rax;
    if (has_signal(pid, thread)) continue;
    make_call_again(*space, thread, registers);
    if (registers.rax != before) (void)::ptrace(PTRACE_SETREGS, thread.value, nullptr, &registers);
  }
}

Result<void> StoppedThreads::check_right() const {
  if (is_right_) return {};
  auto current = space_->check_current();
  is_right_ = current.has_value();
  return current;
}

// Waits for the stop of a thread that was seized and interrupted. A signal that was on its way to
// the program is passed on: the thread stops again at the first instruction of its handler.
Result<void> StoppedThreads::wait_until_stopped(Tid thread, Clock::time_point deadline,
                                                bool& ended) {
  int looks = 0;
  auto pause = std::chrono::microseconds(20);
  // Once at least: others may have taken all the time, and this one have stopped long ago.
  do {
    int status = 0;
    const int got = ::waitpid(thread.value, &status, __WALL | WNOHANG | __WNOTHREAD);
    if (got < 0 && errno != EINTR) {
      ended = true;  // ECHILD: it has ended, and another thread's exec or wait took it
      return {};
    }
    if (got <= 0) {
      if (++looks < kEagerLooks) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(1000));
      continue;
    }
    if (!WIFSTOPPED(status)) {
      ended = true;
      return {};
    }
    const int event = status >> 16;
    if (event == PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP) {
      (void)::ptrace(PTRACE_DETACH, thread.value, nullptr, nullptr);
      return fail(ErrorCode::kBusy, fmt::format("process {} has been stopped", pid_.value),
                  fmt::format("let it go on with `kill -CONT {}`", pid_.value));
    }
    if (event != 0) return {};
    (void)::ptrace(PTRACE_CONT, thread.value, nullptr,
                   as_pointer(static_cast<std::uint64_t>(WSTOPSIG(status))));
  } while (Clock::now() < deadline);
  return fail(ErrorCode::kBusy,
              fmt::format("thread {} of process {} cannot be stopped: it is in a system call that "
                          "nothing interrupts (a disk that does not answer, or a vfork)",
                          thread.value, pid_.value),
              "try again when that has ended");
}

// Another program may have had the thread and have let it go again before it is looked for: "not
// permitted" is believed if none is seen at several looks. 0, or the number of the error, and who
// was seen to have it then.
int StoppedThreads::seize_one(Tid thread, int& tracer) const {
  constexpr int kSeizeTries = 50;
  for (int tries = 0; proc::seize(thread, PTRACE_O_TRACESYSGOOD) != 0; ++tries) {
    const int number = errno;
    if (number != EPERM) return number;
    if (cannot_be_traced(pid_, thread)) return ESRCH;
    if (const int seen = tracer_of(pid_, thread); seen != 0) tracer = seen;
    if (tries >= kSeizeTries) return number;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 0;
}

// Asks all of them to stop before it waits for any.
Result<void> StoppedThreads::seize(std::span<const Tid> threads) {
  is_right_ = false;
  Result<void> worst;
  std::vector<Tid> seized;
  for (const Tid thread : threads) {
    int tracer = 0;
    const int number = seize_one(thread, tracer);
    if (number == ESRCH) continue;  // it has ended, or is one of the kernel's own
    if (number != 0) {
      worst = fail(cannot_stop(pid_, number, tracer));
      break;
    }
    (void)::ptrace(PTRACE_INTERRUPT, thread.value, nullptr, nullptr);
    seized.push_back(thread);
  }
  const auto deadline = Clock::now() + kStopLimit;
  for (const Tid thread : seized) {
    bool ended = false;
    if (auto done = wait_until_stopped(thread, deadline, ended); !done) {
      if (worst) worst = std::move(done);
    } else if (!ended) {
      threads_.push_back(thread);
    }
  }
  return worst;
}

Result<StoppedThreads> StoppedThreads::stop(const AddressSpace& space, Tid thread) {
  return stop(space, std::span(&thread, 1));
}

Result<StoppedThreads> StoppedThreads::stop(const AddressSpace& space,
                                            std::span<const Tid> threads) {
  StoppedThreads stopped(space);
  STASIS_TRY(stopped.seize(threads));
  return stopped;
}

Result<StoppedThreads> StoppedThreads::stop(const AddressSpace& space,
                                            const std::function<bool(Tid)>& wanted) {
  const Pid pid = space.pid();
  StoppedThreads stopped(space);
  std::vector<Tid> known;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::vector<Tid> found;
    for (const Tid thread : ProcFs().threads(pid)) {
      if (std::find(known.begin(), known.end(), thread) != known.end()) continue;
      if (wanted(thread)) found.push_back(thread);
    }
    if (found.empty()) return stopped;
    known.insert(known.end(), found.begin(), found.end());
    STASIS_TRY(stopped.seize(found));
  }
  return fail(ErrorCode::kBusy,
              fmt::format("process {} makes threads faster than they can be stopped", pid.value),
              "try again");
}

Result<StoppedThreads::Registers> StoppedThreads::registers(Tid thread) const {
  Registers out{};
  STASIS_TRY(request(pid_, PTRACE_GETREGS, thread, nullptr, &out));
  return out;
}

Result<void> StoppedThreads::set_registers(Tid thread, const Registers& registers) const {
  STASIS_TRY(check_right());
  Registers copy = registers;
  return request(pid_, PTRACE_SETREGS, thread, nullptr, &copy);
}

Result<std::uint64_t> StoppedThreads::signal_mask(Tid thread) const {
  std::uint64_t mask = 0;
  STASIS_TRY(request(pid_, PTRACE_GETSIGMASK, thread, as_pointer(sizeof mask), &mask));
  return mask;
}

Result<void> StoppedThreads::set_signal_mask(Tid thread, std::uint64_t mask) const {
  STASIS_TRY(check_right());
  return request(pid_, PTRACE_SETSIGMASK, thread, as_pointer(sizeof mask), &mask);
}

Result<void> StoppedThreads::write(Tid thread, std::uint64_t address,
                                   std::span<const std::uint64_t> words) const {
  STASIS_TRY(check_right());
  // In one go where that may be (proc_mem.force_override of the kernel's parameters).
  for (std::size_t i = space_->write_protected(address, words) / 8; i < words.size(); ++i) {
    STASIS_TRY(
        request(pid_, PTRACE_POKEDATA, thread, as_pointer(address + i * 8), as_pointer(words[i])));
  }
  return {};
}

Result<std::int64_t> StoppedThreads::system_call(Tid thread, std::uint64_t instruction,
                                                 std::uint64_t number,
                                                 std::span<const std::uint64_t> arguments) const {
  STASIS_TRY_ASSIGN(auto regs, registers(thread));
  STASIS_TRY(lift_filter(pid_, thread));
  // Or the call would become a SIGSYS.
  const SystemCallDispatch dispatch = dispatch_of(thread);
  if (dispatch.mode != 0) set_dispatch(thread, {});
  const ScopeGuard put_back([&] {
    if (dispatch.mode != 0) set_dispatch(thread, dispatch);
  });
  std::array<std::uint64_t, 6> values{};
  std::copy(arguments.begin(), arguments.end(), values.begin());
  regs.rip = instruction;
  regs.rax = number;
  regs.orig_rax = static_cast<std::uint64_t>(-1);  // or the kernel would restart the last one
  regs.rdi = values[0];
  regs.rsi = values[1];
  regs.rdx = values[2];
  regs.r10 = values[3];
  regs.r8 = values[4];
  regs.r9 = values[5];
  const auto deadline = Clock::now() + kStopLimit;
  std::int64_t answer = 0;
  do {
    STASIS_TRY(set_registers(thread, regs));
    // To its entry, then to its exit. Not by single steps: a tracer that is killed leaves the step
    // armed, and the trap that no tracer takes any more ends the program.
    STASIS_TRY(run_to_call_stop(thread));
    const bool is_ours = is_at_entry_of(thread, instruction, number, values);
    if (!is_ours) STASIS_TRY(skip_call(thread));
    STASIS_TRY(run_to_call_stop(thread));
    if (!is_ours) {
      return fail(refusal(
          {"parking", Severity::kRed, pid_,
           fmt::format("thread {} of process {} was to make a system call for the tool and began "
                       "another one, which was not made: the program changes the code that the "
                       "tool has put into it",
                       thread.value, pid_.value),
           "do not trust that program"}));
    }
    STASIS_TRY_ASSIGN(const auto after, registers(thread));
    // It was in that address space when it was let run, and has entered no call but ours, which is
    // none that takes it elsewhere.
    is_right_ = after.rip == instruction + kSyscallLength && !replaces_memory(number);
    answer = static_cast<std::int64_t>(after.rax);
    // A SIGSTOP or work that waits for the thread has interrupted it: clone() says so, say.
  } while (is_to_be_made_again(answer) && Clock::now() < deadline);
  return answer;
}

Result<void> StoppedThreads::run_to_call_stop(Tid thread) const {
  const auto deadline = Clock::now() + kStopLimit;
  std::uint64_t signal = 0;
  int status = 0;
  do {
    STASIS_TRY(request(pid_, PTRACE_SYSCALL, thread, nullptr, as_pointer(signal)));
    is_right_ = false;
    STASIS_TRY_ASSIGN(status, next_stop(thread, deadline));
    if (status >> 16 == 0 && WSTOPSIG(status) == (SIGTRAP | kSyscallStop)) return {};
    // Nothing holds a SIGSTOP for the program back. It has it: the thread tells then that it stops
    // with the others, makes the call all the same, and stops when it is let go, unless a SIGCONT
    // has come by then (which it tells, too).
    signal = status >> 16 == 0 ? SIGSTOP : 0;
  } while ((status >> 16 == PTRACE_EVENT_STOP || (status >> 8) == SIGSTOP) &&
           Clock::now() < deadline);
  return fail(ErrorCode::kInternal,
              fmt::format("thread {} of process {} did not execute a system call: status {:#x}",
                          thread.value, pid_.value, status),
              "try again; if it stays so, this is a bug to report");
}

Result<int> StoppedThreads::next_stop(Tid thread, Clock::time_point deadline) const {
  int status = 0;
  int got = 0;
  int looks = 0;
  while ((got = ::waitpid(thread.value, &status, __WALL | __WNOTHREAD | WNOHANG)) == 0 ||
         (got < 0 && errno == EINTR)) {
    if (++looks < kEagerLooks) {
      std::this_thread::yield();
      continue;
    }
    if (Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      continue;
    }
    return fail(ErrorCode::kBusy,
                fmt::format("a system call of process {} does not come back", pid_.value),
                "see whether a seccomp supervisor of the process hangs");
  }
  if (got != thread.value || !WIFSTOPPED(status)) return fail(gone(pid_));
  return status;
}

// One that is at its entry.
Result<void> StoppedThreads::skip_call(Tid thread) const {
  STASIS_TRY_ASSIGN(auto regs, registers(thread));
  regs.orig_rax = static_cast<std::uint64_t>(-1);
  return set_registers(thread, regs);
}

bool StoppedThreads::dispatches_system_calls(Tid thread) const {
  return dispatch_of(thread).mode != 0;
}

bool StoppedThreads::leaves_calls_to_supervisor(Tid thread) const {
  const auto filters = filters_of(thread);
  return filters && std::any_of(filters->begin(), filters->end(), [](const auto& filter) {
           return std::any_of(filter.begin(), filter.end(), [](const sock_filter& instruction) {
             return instruction.code == (BPF_RET | BPF_K) &&
                    (instruction.k & SECCOMP_RET_ACTION_FULL) == SECCOMP_RET_USER_NOTIF;
           });
         });
}

Result<StoppedThreads::Registers> StoppedThreads::registers_to_stop_with(Tid thread) const {
  STASIS_TRY_ASSIGN(auto regs, registers(thread));
  make_call_again(*space_, thread, regs);
  // Since Linux 5.13; without it there is no way to tell, and hardly any program uses them.
  RseqConfiguration rseq;
  if (::ptrace(static_cast<__ptrace_request>(kGetRseqConfiguration), thread.value,
               as_pointer(sizeof rseq), &rseq) == static_cast<long>(sizeof rseq) &&
      rseq.area != 0) {
    std::uint64_t section_at = 0;
    RseqCriticalSection section;
    if (space_->read(rseq.area + kRseqCsOffset, &section_at, sizeof section_at) &&
        section_at != 0 && space_->read(section_at, &section, sizeof section) &&
        regs.rip - section.start < section.length) {
      regs.rip = section.abort;
    }
  }
  return regs;
}

// The kernel restarts by itself what it can, and where that is not forbidden.
void StoppedThreads::prepare_to_go_on(Tid thread) const {
  const auto now = registers(thread);
  if (!now || !is_in_system_call(*now)) return;
  const auto result = static_cast<std::int64_t>(now->rax);
  if (result == -EINTR) {
    if (auto on = registers_to_go_on(thread)) (void)set_registers(thread, *on);
  } else if (result == kRestartBlock && !may_restart(pid_, thread)) {
    if (auto on = registers_to_stop_with(thread)) (void)set_registers(thread, *on);
  }
}

Result<void> StoppedThreads::let_run(Tid thread, std::chrono::nanoseconds time) {
  prepare_to_go_on(thread);
  is_right_ = false;
  STASIS_TRY(request(pid_, PTRACE_CONT, thread, nullptr, nullptr));
  // It may be moved meanwhile; then once more there.
  constexpr int kMoves = 3;
  for (int moves = 0; moves < kMoves; ++moves) {
    const int processor = processor_of(pid_, thread);
    run_on(processor);
    sleep_precisely(time);
    if (processor_of(pid_, thread) == processor) break;
  }
  (void)::ptrace(PTRACE_INTERRUPT, thread.value, nullptr, nullptr);
  bool ended = false;
  auto done = wait_until_stopped(thread, Clock::now() + kStopLimit, ended);
  if (!done || ended) std::erase(threads_, thread);
  if (done && ended) return fail(gone(pid_));
  return done;
}

Result<StoppedThreads::Registers> StoppedThreads::registers_to_go_on(Tid thread) const {
  auto regs = registers_to_stop_with(thread);
  if (!regs || !is_in_system_call(*regs)) return regs;
  const auto result = static_cast<std::int64_t>(regs->rax);
  if (is_to_be_made_again(result)) {
    regs->rax = regs->orig_rax;
    regs->rip -= kSyscallLength;
  }
  regs->orig_rax = static_cast<std::uint64_t>(-1);
  return regs;
}

void StoppedThreads::let_go() {
  for (const Tid thread : threads_) {
    prepare_to_go_on(thread);
    (void)::ptrace(PTRACE_DETACH, thread.value, nullptr, nullptr);
  }
  threads_.clear();
}

}  // namespace stasis::proc
