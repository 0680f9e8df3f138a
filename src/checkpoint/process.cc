#include "checkpoint/process.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include "abi/agent_thread.h"
#include "base/fault_point.h"
#include "base/trace.h"
#include "driver/driver_errors.h"
#include "proc/address_space.h"
#include "proc/cgroup.h"
#include "proc/parking.h"

namespace stasis {
namespace {

constexpr int kCuIllegalState = 401;
constexpr int kCuNotInitialized = 3;
// A roll-back may have to lock a process that runs again; it must not wait for ever.
constexpr std::chrono::seconds kUndoLockTimeout{30};

// The one state in which each action is allowed (docs.nvidia.com, CUDA driver API, "CUDA
// Checkpointing").
CudaState allowed_in(Action action) {
  switch (action) {
    case Action::kLock:
      return CudaState::kRunning;
    case Action::kRestore:
      return CudaState::kCheckpointed;
    default:
      return CudaState::kLocked;
  }
}

bool is_own_thread(Tid thread) {
  return ::access(fmt::format("/proc/self/task/{}", thread.value).c_str(), F_OK) == 0;
}

}  // namespace

Result<Process> Process::open(Driver& driver, Pid pid, proc::ProcFs procfs) {
  // First the pidfd and then /proc, so that what is read is of the pidfd's process and not of an
  // earlier one with the same number. It is /proc that can name the process of a thread.
  auto pidfd = Pidfd::open(pid);
  if (!pidfd) {
    STASIS_TRY(procfs.process(pid));
    return fail(std::move(pidfd.error()));
  }
  STASIS_TRY_ASSIGN(auto info, procfs.process(pid));
  if (info.has_ended() || !pidfd->alive()) return fail(procfs.ended_error(info));
  return Process(driver, std::move(*pidfd), std::move(info), std::move(procfs));
}

Error Process::explain(Action action, const DriverFailure& failure) const {
  // A process that is just dying is a zombie for a while before its pidfd says so: threads of the
  // driver take their time to end. And before that it is neither: the driver is the first to
  // notice.
  constexpr int kOsFailure = 304;
  constexpr int kEndingMs = 100;
  if (failure.number == kOsFailure) (void)pidfd().wait_exit(kEndingMs);
  const auto now = procfs_.process(pid());
  // Not one of which only the first thread has ended, which the driver refuses.
  if (!alive() || (now && now->has_ended() && procfs_.is_ending(pid()))) {
    Error gone{ErrorCode::kProcessGone,
               fmt::format("process {} ({}) ended during {}", pid().value, info_.comm,
                           action_name(action)),
               "start the program again, or restore it from an image",
               failure,
               {}};
    if (action == Action::kCheckpoint) {
      // Seen on driver 580.159.04: these calls pass the lock, and find the GPU gone.
      gone.remedy +=
          "; a program that calls cuCtxSynchronize, cuStreamSynchronize or cuStreamQuery while it "
          "is checkpointed is ended by driver 580: suspend it with `stasis suspend`, which keeps "
          "its threads still";
    }
    return gone;
  }
  return explain_driver_failure(failure, action, pid(), procfs_);
}

Result<bool> Process::can_answer(proc::FrozenCgroups* cgroups) const {
  const auto now = procfs_.state(pid());
  if (!now) return true;  // the driver's answer is explained in any case
  if (*now != 'T' && *now != 't') {
    if (*now == 'R') return true;
    const auto frozen = cgroups != nullptr ? cgroups->of(pid()) : proc::frozen_cgroup(pid());
    if (!frozen) return true;
    const auto maps = procfs_.maps_file(pid(), "libcuda.so");
    if (maps && !*maps) return true;
    return fail(
        ErrorCode::kBusy,
        fmt::format("process {} ({}) is frozen with its cgroup {}, and its driver cannot answer",
                    pid().value, info_.comm, frozen->directory),
        fmt::format("let it go on: `docker unpause`, or `echo {} >{}/{}`",
                    frozen->version1 ? "THAWED" : "0", frozen->directory,
                    frozen->version1 ? "freezer.state" : "cgroup.freeze"));
  }
  // The driver answers by itself for a process without its library.
  const auto maps = procfs_.maps_file(pid(), "libcuda.so");
  if (maps && !*maps) return true;
  // This question needs no answer by the process (tests/conformance, questions_while_lock_waits;
  // CRIU's own plugin asks it of frozen ones).
  const auto tid = driver_->restore_thread_id(pid());
  if (!tid) {
    Error error = explain(Action::kGetRestoreThreadId, tid.error());
    if (error.code == ErrorCode::kNotCuda) return false;
    return fail(std::move(error));
  }
  const auto thread = procfs_.thread(pid(), *tid);
  const auto status = procfs_.thread_status(pid(), *tid);
  // Another tracer that lets it run can hold it again at any moment.
  const bool ours = status && status->tracer != 0 && is_own_thread(Tid{status->tracer});
  if (ours && thread && thread->state != 'T' && thread->state != 't') return true;
  if (*now == 'T') {
    return fail(ErrorCode::kBusy,
                fmt::format("process {} ({}) is stopped, and its driver cannot answer", pid().value,
                            info_.comm),
                fmt::format("let it go on with `kill -CONT {}`", pid().value));
  }
  const auto details = procfs_.details(pid());
  if (details && details->tracer == 0) {
    return fail(
        ErrorCode::kBusy,
        fmt::format("another program (CRIU, or a debugger) has held process {} ({}) and let "
                    "it go at this moment, and its driver could not answer",
                    pid().value, info_.comm),
        "try again when that has ended");
  }
  return fail(ErrorCode::kBusy,
              fmt::format("process {} ({}) is held by process {} (CRIU, or a debugger), and its "
                          "driver cannot answer",
                          pid().value, info_.comm, details ? details->tracer : 0),
              "wait for that to end, or detach it");
}

Result<std::optional<CudaState>> Process::cuda_state(proc::FrozenCgroups* cgroups) const {
  // The driver asks a thread of the target, and waits for its answer for ever (580.159.04).
  STASIS_TRY_ASSIGN(auto able, can_answer(cgroups));
  if (!able) return std::optional<CudaState>();
  auto state = driver_->state(pid());
  // What most processes of a tree answer needs no explanation.
  const bool is_without = !state && state.error().number == kCuNotInitialized && alive();
  if (is_without || lives_in_memory_of()) return std::optional<CudaState>();
  if (state) {
    if (alive()) return *state;
    return fail(explain(Action::kGetState, driver_->describe(kCuNotInitialized)));
  }
  Error error = explain(Action::kGetState, state.error());
  if (error.code == ErrorCode::kNotCuda) return std::optional<CudaState>();
  return fail(std::move(error));
}

std::optional<Pid> Process::lives_in_memory_of() const {
  const Pid parent = info_.parent;
  if (parent.value <= 0 || !proc::share_address_space(pid(), parent)) return std::nullopt;
  const auto thread = driver_->restore_thread_id(pid());
  const std::vector<Tid> threads = procfs_.threads(pid());
  if (thread && std::find(threads.begin(), threads.end(), *thread) != threads.end())
    return std::nullopt;
  return parent;
}

Result<CudaState> Process::state() const {
  STASIS_TRY_ASSIGN(auto state, cuda_state());
  if (!state) return fail(explain(Action::kGetState, driver_->describe(kCuNotInitialized)));
  return *state;
}

Result<Tid> Process::restore_thread_id() const {
  auto tid = driver_->restore_thread_id(pid());
  if (!tid) return fail(explain(Action::kGetRestoreThreadId, tid.error()));
  return *tid;
}

Result<void> Process::expect(Action action, CudaState wanted) const {
  STASIS_TRY_ASSIGN(auto now, state());
  if (now == wanted) return {};
  Error error;
  error.code = now == CudaState::kFailed ? ErrorCode::kFailedState : ErrorCode::kWrongState;
  error.message = fmt::format("process {} is {}, and {} needs it {}", pid().value,
                              cuda_state_name(now), action_name(action), cuda_state_name(wanted));
  error.remedy =
      now == CudaState::kFailed
          ? "the driver gave its CUDA state up; end the process and restore it from an "
            "image"
          : fmt::format(
                "`stasis recover {}` makes it run again{}", pid().value,
                now == CudaState::kCheckpointed ? ", unless the driver refuses to restore it" : "");
  error.driver = driver_->describe(kCuIllegalState);
  return fail(std::move(error));
}

Result<void> Process::lock(std::chrono::milliseconds timeout) {
  auto allowed = expect(Action::kLock, allowed_in(Action::kLock));
  return allowed ? lock_now(timeout, nullptr) : allowed;
}

Result<void> Process::lock_again(std::chrono::milliseconds timeout, const Interrupt& interrupt) {
  return lock_now(timeout, &interrupt);
}

Result<void> Process::lock_now(std::chrono::milliseconds timeout, const Interrupt* interrupt) {
  // What the question about the state would have found; neither costs more than microseconds.
  STASIS_TRY(can_answer());
  if (!alive()) return fail(explain(Action::kLock, driver_->describe(kCuNotInitialized)));
  done_to_it_ = Done::kSomething;
  return between(FaultPoint::kLockBefore, FaultPoint::kLockAfter, [&]() -> Result<void> {
    const Span span(TraceKind::kDriver, "lock", pid());
    auto done = interrupt == nullptr ? driver_->lock(pid(), timeout)
                                     : driver_->lock_unless(pid(), timeout, *interrupt);
    if (done) return {};
    if (done.error().number == kDriverInterrupted) return interrupt->check();
    return fail(explain(Action::kLock, done.error()));
  });
}

Result<void> Process::lock_unless(std::chrono::milliseconds timeout, const Interrupt& interrupt) {
  STASIS_TRY(interrupt.check());
  STASIS_TRY(expect(Action::kLock, allowed_in(Action::kLock)));
  done_to_it_ = Done::kSomething;
  StateGuard guard(*this, CudaState::kRunning);
  auto done = between(FaultPoint::kLockBefore, FaultPoint::kLockAfter, [&]() -> Result<void> {
    const Span span(TraceKind::kDriver, "lock", pid());
    auto locked = driver_->lock_unless(pid(), timeout, interrupt);
    if (!locked) return fail(explain(Action::kLock, locked.error()));
    return {};
  });
  const bool answered = done || (done.error().driver && done.error().driver->number >= 0);
  // A caller that has asked to stop no longer expects a locked process.
  const bool stopped = done && !(done = interrupt.check());
  if (answered && !stopped) {
    guard.dismiss();
    return done;
  }
  STASIS_TRY(guard.undo());
  if (interrupt.requested() && done.error().code != ErrorCode::kProcessGone) {
    return fail(ErrorCode::kInterrupted,
                fmt::format("the lock of process {} was given up; it runs on", pid().value));
  }
  return done;
}

Result<void> Process::checkpoint() {
  STASIS_TRY(expect(Action::kCheckpoint, allowed_in(Action::kCheckpoint)));
  done_to_it_ = Done::kSomething;
  return between(FaultPoint::kCheckpointBefore, FaultPoint::kCheckpointAfter,
                 [&]() -> Result<void> {
                   const Span span(TraceKind::kDriver, "checkpoint", pid());
                   auto done = driver_->checkpoint(pid());
                   if (!done) return fail(explain(Action::kCheckpoint, done.error()));
                   return {};
                 });
}

Result<void> Process::restore(std::span<const GpuPair> pairs) {
  STASIS_TRY(expect(Action::kRestore, allowed_in(Action::kRestore)));
  if (!pairs.empty() && !driver_->info().has_device_map) {
    return fail(
        ErrorCode::kDeviceMapUnsupported,
        fmt::format("this driver cannot move a process to other GPUs (it supports CUDA "
                    "{}.{})",
                    driver_->info().cuda_version / 1000, driver_->info().cuda_version % 1000 / 10),
        "install driver 580 or newer, or restore without a GPU map");
  }
  STASIS_TRY(check_host_memory_is_there(pid()));
  done_to_it_ = Done::kSomething;
  STASIS_TRY(fault(FaultPoint::kRestoreBefore));
  Span span(TraceKind::kDriver, "restore", pid());
  auto done = driver_->restore(pid(), pairs);
  span.end();
  if (!done) {
    Error error = explain(Action::kRestore, done.error());
    if (pairs.empty() && error.code == ErrorCode::kDeviceMapInvalid) {
      // 1 without a map: seen on driver 580.159.04 where another process's memory was opened (CUDA
      // IPC).
      const DriverFailure said = std::move(*error.driver);
      error = refusal(
          {"shared-gpu-memory", Severity::kRed, pid(),
           fmt::format("the driver cannot restore process {} (driver: {} {}, \"{}\")", pid().value,
                       said.name, said.number, said.text),
           "usual cause: GPU memory that is shared between processes (CUDA IPC, NCCL's P2P or "
           "shared-memory transports), which driver 580 checkpoints and cannot restore"});
      error.driver = said;
    }
    return fail(std::move(error));
  }
  return fault(FaultPoint::kRestoreAfter);
}

Result<void> Process::unlock() {
  STASIS_TRY(expect(Action::kUnlock, allowed_in(Action::kUnlock)));
  done_to_it_ = Done::kSomething;
  auto unlocked =
      between(FaultPoint::kUnlockBefore, FaultPoint::kUnlockAfter, [&]() -> Result<void> {
        const Span span(TraceKind::kDriver, "unlock", pid());
        auto done = driver_->unlock(pid());
        if (!done) return fail(explain(Action::kUnlock, done.error()));
        return {};
      });
  if (unlocked) unlocked = let_go_on();
  if (unlocked) done_to_it_ = Done::kRuns;
  return unlocked;
}

std::vector<Tid> agents_threads(Pid pid) {
  const proc::ProcFs procfs;
  std::vector<Tid> found;
  for (const Tid thread : procfs.threads(pid)) {
    const auto known = procfs.thread(pid, thread);
    if (known && known->comm == kAgentThread) found.push_back(thread);
  }
  return found;
}

Result<void> Process::park_threads(bool agent_works) {
  done_to_it_ = Done::kSomething;
  STASIS_TRY_ASSIGN(auto tid, restore_thread_id());
  // With that thread parked, the driver could never act on the process again.
  const auto threads = procfs_.threads(pid());
  if (std::find(threads.begin(), threads.end(), tid) == threads.end()) {
    return fail(ErrorCode::kInternal,
                fmt::format("the driver says that thread {} restores process {}, which has none "
                            "such",
                            tid.value, pid().value),
                "run stasis in the PID namespace of the process, or outside of it");
  }
  return between(FaultPoint::kParkBefore, FaultPoint::kParkAfter, [&] {
    const Span span(TraceKind::kDriver, "park threads", pid());
    auto spared = agent_works ? agents_threads(pid()) : std::vector<Tid>();
    spared.push_back(tid);
    return ::stasis::park_threads(pid(), spared);
  });
}

Result<void> Process::park_agent() {
  done_to_it_ = Done::kSomething;
  STASIS_TRY_ASSIGN(auto tid, restore_thread_id());
  return park_more_threads(pid(), {tid});
}

bool Process::is_kept_still() const {
  const auto tid = restore_thread_id();
  const auto space = proc::AddressSpace::open(pid());
  if (!tid || !space) return false;
  auto spared = agents_threads(pid());
  spared.push_back(*tid);
  return all_are_parked(*space, spared);
}

Result<void> Process::let_go_on() {
  const Span span(TraceKind::kDriver, "let threads go", pid());
  auto done = unpark_threads(pid());
  if (done) done = fault(FaultPoint::kUnparkAfter);
  if (done || !alive() || done.error().code == ErrorCode::kProcessGone) return {};
  Error error = std::move(done.error());
  error.message =
      fmt::format("threads of process {} are still held: {}", pid().value, error.message);
  error.remedy = fmt::format("run `stasis recover {}`; {}", pid().value, error.remedy);
  return fail(std::move(error));
}

Result<void> Process::bring_to(CudaState wanted, std::chrono::milliseconds timeout) {
  // At most two actions lie between any two states; more turns mean that another tool acts too.
  for (int turn = 0; turn < 4; ++turn) {
    auto now = state();
    if (!now) {
      // Another program since, by exec, of which a thread may have been parked all the same.
      if (now.error().code == ErrorCode::kNotCuda) (void)let_go_on();
      return fail(std::move(now.error()));
    }
    if (*now == wanted) return wanted == CudaState::kCheckpointed ? Result<void>() : let_go_on();
    Result<void> done;
    if (*now == CudaState::kRunning) {
      // A tool that was killed between an unlock and this has left threads parked, whose work in
      // flight the lock would wait for.
      done = let_go_on();
      if (done) done = lock(timeout);
    } else if (*now == CudaState::kCheckpointed) {
      done = restore();
    } else if (*now == CudaState::kLocked) {
      if (wanted == CudaState::kRunning) {
        done = unlock();
      } else {
        done = park_threads();
        if (done) done = checkpoint();
      }
    } else {
      return expect(Action::kUnlock, CudaState::kLocked);  // failed: says so
    }
    if (!done) return done;
  }
  return fail(ErrorCode::kBusy,
              fmt::format("the CUDA state of process {} keeps changing", pid().value),
              "another tool acts on it; wait for it to end");
}

Result<void> StateGuard::undo() {
  Process* process = std::exchange(process_, nullptr);
  if (process == nullptr || !process->alive()) return {};
  auto done = process->bring_to(initial_, kUndoLockTimeout);
  if (done || !process->alive() || done.error().code == ErrorCode::kProcessGone) return {};
  auto now = process->cuda_state();
  // By exec it becomes another program at any moment, and answers nothing in the midst of that.
  constexpr std::chrono::milliseconds kExec{300};
  constexpr std::chrono::milliseconds kPoll{10};
  const auto deadline = std::chrono::steady_clock::now() + kExec;
  while (!now && process->alive() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPoll);
    now = process->cuda_state();
  }
  if (now && !*now) return {};
  // Only the last question had failed. In a process that runs, threads may be held all the same.
  if (now && *now == initial_ && (initial_ == CudaState::kCheckpointed || process->let_go_on())) {
    return {};
  }
  // Stopped by a signal, or held by another tool, it answers no question.
  if (!now && now.error().code == ErrorCode::kBusy && process->is_left_as(initial_)) return {};
  if (!now && now.error().code == ErrorCode::kNotPermitted) {
    const int pid = process->pid().value;
    return fail(
        ErrorCode::kNotRolledBack,
        fmt::format(
            "process {} has other rights now than when this began, and its memory cannot be "
            "read any more: {}",
            pid, done.error().message),
        fmt::format("if it has become another program (setuid, or with file capabilities), "
                    "nothing is left to bring back; if not, run `sudo stasis recover {}`",
                    pid));
  }
  const std::string_view seen =
      now && *now ? cuda_state_name(**now) : std::string_view("in an unknown state");
  return fail(
      ErrorCode::kNotRolledBack,
      fmt::format("process {} is {} and could not be brought back to {}: {}", process->pid().value,
                  seen, cuda_state_name(initial_), done.error().message),
      done.error().code == ErrorCode::kFailedState
          ? done.error().remedy
          : fmt::format("run `stasis recover {}`; {}", process->pid().value, done.error().remedy));
}

}  // namespace stasis
