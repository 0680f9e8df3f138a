// One CUDA process: its identity and the state machine of the driver's four actions.
//
// A Process is a handle on a process that is not ours, held by pidfd and start time so that it
// cannot come to mean another one. Destroying it changes nothing in the target; what has to be
// undone is held by a StateGuard. May be moved between threads, not shared by them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/cuda_state.h"
#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "driver/driver.h"
#include "proc/cgroup.h"
#include "proc/procfs.h"

namespace stasis {

class Process {
 public:
  // `driver` must outlive the Process. kNoSuchProcess, kThreadId, kZombie, kNotPermitted.
  // Says nothing yet about CUDA.
  static Result<Process> open(Driver& driver, Pid pid, proc::ProcFs procfs = proc::ProcFs());

  Pid pid() const { return info_.pid; }
  ProcessId id() const { return info_.id(); }
  const proc::ProcessInfo& info() const { return info_; }
  // False once it has exited, also while it is a zombie.
  bool alive() const { return pidfd_.alive(); }
  const Pidfd& pidfd() const { return pidfd_; }

  // The state, or nothing for a process that does not use CUDA, which is a value and not an error,
  // or lives_in_memory_of() another.
  // kBusy for a process that is stopped or traced, unless the tool has woken the thread by which
  // its driver answers (proc::AwakeThread). Must not be asked while a lock is pending in another
  // thread: the driver answers only when that lock ends (580.159.04).
  // `cgroups`: of the look at many processes that this is part of.
  Result<std::optional<CudaState>> cuda_state(proc::FrozenCgroups* cgroups = nullptr) const;

  // Its parent, if it runs in the memory of that (vfork, CLONE_VM) and is not the one of the two
  // that uses the CUDA there: whatever the driver finds in it is the parent's.
  std::optional<Pid> lives_in_memory_of() const;

  // The calls below are the driver's. kNotCuda where the process does not use CUDA.
  Result<CudaState> state() const;
  Result<Tid> restore_thread_id() const;
  // running -> locked. Zero waits for ever. kTimeout leaves it running.
  Result<void> lock(std::chrono::milliseconds timeout);
  // The same without asking the driver for the state first, which costs time in which a process
  // that was just unlocked gets further. kWrongState if it is locked already. kInterrupted as soon
  // as `interrupt` asks to stop, where calls of the driver can be ended (bounded_driver.h): it may
  // have been locked at that very moment.
  Result<void> lock_again(std::chrono::milliseconds timeout, const Interrupt& interrupt);
  // As lock(), and kInterrupted when `interrupt` asks to stop: it runs then, or kNotRolledBack.
  Result<void> lock_unless(std::chrono::milliseconds timeout, const Interrupt& interrupt);
  // locked -> checkpointed. kNotSupported (managed memory) leaves it locked.
  Result<void> checkpoint();
  // checkpointed -> locked. `pairs`: empty or complete (see gpu_map.h).
  Result<void> restore(std::span<const GpuPair> pairs = {});
  // locked -> running. Threads that were kept still go on.
  Result<void> unlock();

  // Keeps every thread but the driver's own still until unlock(), also after the process has been
  // dumped and restored: in a checkpointed process a call of the driver may be fatal (parking.h).
  // `agent_works`: and the agent's, which the tool will ask for something that takes no driver.
  // Called when the process is locked. kBusy, kNotPermitted: nothing has changed.
  Result<void> park_threads(bool agent_works = false);
  // The same for a process that is checkpointed, and whose agent was to work until now. On an error
  // its other threads are kept still all the same.
  Result<void> park_agent();
  // Whether every thread but the driver's own and the agent's is kept still, by this tool or
  // another.
  bool is_kept_still() const;
  // Undoes park_threads(), where something other than unlock() has made the process run.
  Result<void> let_go_on();

  // Brings the process to `wanted` by as many actions as it takes, whichever state it is in.
  // `timeout` is for the lock, if one is needed.
  Result<void> bring_to(CudaState wanted, std::chrono::milliseconds timeout = {});

  // Whether it is in `initial`, in which it was found, without that the driver has to be asked:
  // this has done nothing to it, or has made it run again.
  bool is_left_as(CudaState initial) const {
    return done_to_it_ == Done::kNothing ||
           (done_to_it_ == Done::kRuns && initial == CudaState::kRunning);
  }

 private:
  Process(Driver& driver, Pidfd pidfd, proc::ProcessInfo info, proc::ProcFs procfs)
      : driver_(&driver),
        pidfd_(std::move(pidfd)),
        info_(std::move(info)),
        procfs_(std::move(procfs)) {}
  Result<void> lock_now(std::chrono::milliseconds timeout, const Interrupt* interrupt);
  // False for a process without CUDA. kBusy if the process is stopped or traced: every call of the
  // driver would hang.
  Result<bool> can_answer(proc::FrozenCgroups* cgroups = nullptr) const;
  // Refuses the action if the process has gone or is in a state that does not allow it.
  Result<void> expect(Action action, CudaState wanted) const;
  Error explain(Action action, const DriverFailure& failure) const;

  Driver* driver_;
  Pidfd pidfd_;
  proc::ProcessInfo info_;
  proc::ProcFs procfs_;
  enum class Done { kNothing, kRuns, kSomething };
  Done done_to_it_ = Done::kNothing;
};

// The destructor brings a process back to the state it was in, unless dismiss() was called. It
// cannot report a failure, so a caller that needs the result calls undo() first.
class StateGuard {
 public:
  StateGuard(Process& process, CudaState initial) : process_(&process), initial_(initial) {}
  StateGuard(StateGuard&& other) noexcept
      : process_(std::exchange(other.process_, nullptr)), initial_(other.initial_) {}
  StateGuard(const StateGuard&) = delete;
  StateGuard& operator=(const StateGuard&) = delete;
  StateGuard& operator=(StateGuard&&) = delete;
  ~StateGuard() { (void)undo(); }

  // kNotRolledBack, naming the process, its state and the command that mends it. At most once.
  Result<void> undo();
  void dismiss() { process_ = nullptr; }

 private:
  Process* process_;
  CudaState initial_;
};

// Those that have the name of our agent's, which are to work where the others are kept still. As
// all in a process, the target's to fake.
std::vector<Tid> agents_threads(Pid pid);

}  // namespace stasis
