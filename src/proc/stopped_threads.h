// Threads of another process, stopped by ptrace, with their registers and memory.
//
// ptrace is bound to the thread that seized: make, use and destroy a StoppedThreads on one thread,
// one made for it, because a thread that cannot be stopped stays seized until that thread ends.
// When it ends or is killed, the kernel lets all go; they run on with the registers they have then.
//
// All are threads of one address space, which must outlive this: before the first change that is
// made while a thread is stopped, it is seen that the process still runs in it. While a thread is
// stopped it cannot call execve(2), and an execve of another thread ends it. Nor can it while it
// makes a system call for us: it is stopped at the entry of whatever call it makes.
#pragma once

#include <sys/user.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "proc/address_space.h"

namespace stasis::proc {

// A signal mask is a word whose bit N - 1 stands for signal N.
inline constexpr std::uint64_t kAllSignals = ~0ULL;

// Is the thread one of the kernel's own, which work for the process (io_uring) and never return to
// the program's code? Some kernels let them be traced. False if it has ended.
bool is_kernels_own(Pid pid, Tid thread);

// Was the thread stopped in a system call?
bool is_in_system_call(const user_regs_struct& registers);

// Where a stopped thread was interrupted in a call that would end with EINTR in a restored process,
// or that returns it after any stop, `registers` become those with which the kernel makes the call
// again when it goes on.
void make_call_again(const AddressSpace& space, Tid thread, user_regs_struct& registers);
// The same for all threads of a process that the calling thread traces and has stopped, but for
// those that a signal waits for.
void make_calls_again(Pid pid);

class StoppedThreads {
 public:
  using Registers = user_regs_struct;

  // Stops all threads of the process that `wanted` accepts, also those that are made meanwhile.
  // kBusy if another tracer holds one or one cannot be stopped (uninterruptible sleep, vfork),
  // kNotPermitted. On an error all run on as they were.
  static Result<StoppedThreads> stop(const AddressSpace& space,
                                     const std::function<bool(Tid)>& wanted);
  // The same for one thread, or some; one that has ended is not held.
  static Result<StoppedThreads> stop(const AddressSpace& space, Tid thread);
  static Result<StoppedThreads> stop(const AddressSpace& space, std::span<const Tid> threads);

  StoppedThreads(StoppedThreads&&) noexcept = default;  // which leaves the other without threads
  StoppedThreads(const StoppedThreads&) = delete;
  StoppedThreads& operator=(const StoppedThreads&) = delete;
  StoppedThreads& operator=(StoppedThreads&&) = delete;
  ~StoppedThreads() { let_go(); }

  const std::vector<Tid>& threads() const { return threads_; }

  // kProcessGone where the thread has been killed meanwhile, and, of all that changes something,
  // where the process has become another program.
  Result<Registers> registers(Tid thread) const;
  Result<void> set_registers(Tid thread, const Registers& registers) const;
  Result<std::uint64_t> signal_mask(Tid thread) const;
  Result<void> set_signal_mask(Tid thread, std::uint64_t mask) const;

  // Writes whole words into the process's memory, whatever its protection (a private copy is made
  // of a file's page).
  Result<void> write(Tid thread, std::uint64_t address, std::span<const std::uint64_t> words) const;

  // Executes the system call instruction (0f 05) at `instruction` in `thread`, whose registers are
  // changed by it, and whose signals the caller has blocked; a SIGSTOP, which nothing blocks, stops
  // the others at once and this one when it is let go. The call's own answer, negative for an
  // error. No other call is made where the process has exchanged the instruction: kNotSupported.
  // Where the process's system calls are filtered (seccomp) that is lifted for it, if we may;
  // kNotSupported where the filter lets none of ours pass.
  Result<std::int64_t> system_call(Tid thread, std::uint64_t instruction, std::uint64_t number,
                                   std::span<const std::uint64_t> arguments) const;

  // The registers with which a thread can be sent on from another stop like this one, later: the
  // kernel then makes the system call again that was interrupted, or lets it end with EINTR if a
  // signal has come meanwhile. A restartable sequence (rseq) begins anew.
  Result<Registers> registers_to_stop_with(Tid thread) const;
  // The same for going on from anywhere: the call is made again in any case.
  Result<Registers> registers_to_go_on(Tid thread) const;

  // Are its system calls turned into signals by where they are made (PR_SET_SYSCALL_USER_DISPATCH)?
  // False before Linux 6.4, which does not tell.
  bool dispatches_system_calls(Tid thread) const;
  // Does a filter of its system calls leave some of them to a supervisor (SECCOMP_RET_USER_NOTIF)?
  // False where the filters may not be read: that takes CAP_SYS_ADMIN and no filter of our own.
  bool leaves_calls_to_supervisor(Tid thread) const;

  // Lets one thread run for about so long and stops it again, wherever it is then: the calling
  // thread sleeps on the processor that the other one runs on, and is woken by that processor's
  // timer. Asked from another processor, a thread stops at the end of its next system call, so one
  // that makes many would never be seen anywhere else. Binds the calling thread to a processor.
  // kProcessGone if it has ended meanwhile; kBusy as for stop().
  Result<void> let_run(Tid thread, std::chrono::nanoseconds time);

  // Lets all threads run on.
  void let_go();

 private:
  using Clock = std::chrono::steady_clock;

  explicit StoppedThreads(const AddressSpace& space) : space_(&space), pid_(space.pid()) {}
  // That these are threads of that address space.
  Result<void> check_right() const;
  // Lets it run to the entry of its next system call, or from there to the call's exit.
  Result<void> run_to_call_stop(Tid thread) const;
  // How a thread that was sent on has stopped, as waitpid(2) tells it.
  Result<int> next_stop(Tid thread, Clock::time_point deadline) const;
  Result<void> skip_call(Tid thread) const;
  void prepare_to_go_on(Tid thread) const;
  int seize_one(Tid thread, int& tracer) const;
  Result<void> seize(std::span<const Tid> threads);
  Result<void> wait_until_stopped(Tid thread, Clock::time_point deadline, bool& ended);

  const AddressSpace* space_;
  Pid pid_;
  std::vector<Tid> threads_;
  mutable bool is_right_ = false;  // since the last stop
};

}  // namespace stasis::proc
