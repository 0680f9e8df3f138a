// One thread that runs while all others of its process are held, by its tracer or by a stop signal.
//
// The driver acts on a process through a thread of that process, so a process that CRIU holds, or
// that a stop signal has stopped, can be checkpointed and restored only while that one runs. It
// gets no signals meanwhile but SIGTRAP, SIGKILL and SIGSTOP: a handler of the program would run on
// it.
//
// ptrace is bound to a thread: make, tend and stop an AwakeThread on the same one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

class AwakeThread {
 public:
  // Lets a thread go on that the calling thread traces and that is in a ptrace stop now. On an
  // error it is as it was. kBusy if another thread traces it or none does; kProcessGone.
  static Result<AwakeThread> wake(Pid pid, Tid thread);
  // The same for one that has no tracer, in a process that a stop signal holds. stop() lets it go.
  static Result<AwakeThread> seize(Pid pid, Tid thread);

  AwakeThread(AwakeThread&& other) noexcept
      : pid_(other.pid_),
        thread_(other.thread_),
        mask_(other.mask_),
        detach_(other.detach_),
        awake_(std::exchange(other.awake_, false)) {}
  AwakeThread(const AwakeThread&) = delete;
  AwakeThread& operator=(const AwakeThread&) = delete;
  AwakeThread& operator=(AwakeThread&&) = delete;
  ~AwakeThread() { (void)stop(); }

  Pid pid() const { return pid_; }
  Tid thread() const { return thread_; }

  // A tracer has to let its thread go on whenever something stops it. Called every few milliseconds
  // while something waits for the thread. False once it has ended.
  bool tend();

  // Stops it again, with the signal mask it had. Does the rest also after a failure. No error if it
  // has ended. kBusy if it cannot be stopped within some seconds: it is left running.
  Result<void> stop();

 private:
  AwakeThread(Pid pid, Tid thread, bool detach) : pid_(pid), thread_(thread), detach_(detach) {}
  Result<void> let_go_on();
  // Until the stop that was asked for; signals on their way are passed on.
  Result<bool> wait_for_stop();

  Pid pid_;
  Tid thread_;
  std::uint64_t mask_ = 0;
  bool detach_ = false;
  bool awake_ = false;
};

// Runs `act` on another thread, which gets no signals, and tends the awake threads meanwhile. True
// when `act` has returned and that thread has ended. False if `limit` (zero: none) is over first:
// `act` then goes on by itself, to the end of this process if it must, so whatever it uses has to
// be its own. Where the system gives no thread, runs it on this one.
bool run_beside(std::vector<AwakeThread>& awake, const std::function<void()>& act,
                std::chrono::milliseconds limit = {});

}  // namespace stasis::proc
