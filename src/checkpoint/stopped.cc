#include "checkpoint/stopped.h"

#include <csignal>
#include <vector>

#include <fmt/format.h>

#include "proc/awake_thread.h"

namespace stasis {

Result<void> bring_stopped_to(Process& process, CudaState wanted) {
  constexpr std::chrono::seconds kLockTimeout{30};
  const auto now = proc::ProcFs().process(process.pid());
  if (!now || now->state != 'T') return process.bring_to(wanted, kLockTimeout);
  auto tid = process.restore_thread_id();
  if (!tid) return fail(std::move(tid.error()));
  auto thread = proc::AwakeThread::seize(process.pid(), *tid);
  if (!thread) return fail(std::move(thread.error()));
  std::vector<proc::AwakeThread> awake;
  awake.push_back(std::move(*thread));
  Result<void> done;
  (void)proc::run_beside(awake, [&] { done = process.bring_to(wanted, kLockTimeout); });
  auto stopped = awake.front().stop();
  if (done) done = std::move(stopped);
  if (done) done = process.pidfd().signal(SIGCONT);
  return done;
}

}  // namespace stasis
