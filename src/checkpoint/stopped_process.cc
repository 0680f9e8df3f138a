#include "checkpoint/stopped_process.h"

#include <csignal>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "proc/awake_thread.h"
#include "proc/bounded_seize.h"

namespace stasis {

namespace {

Result<void> bring_to(Process& process, CudaState wanted, std::chrono::milliseconds limit) {
  constexpr std::chrono::seconds kLockTimeout{30};
  std::vector<proc::AwakeThread> awake;
  const auto now = proc::ProcFs().process(process.pid());
  const bool stopped = now && now->state == 'T';
  if (stopped) {
    STASIS_TRY_ASSIGN(auto tid, process.restore_thread_id());
    STASIS_TRY_ASSIGN(auto thread, proc::AwakeThread::seize(process.pid(), tid));
    awake.push_back(std::move(thread));
  }
  const auto result = std::make_shared<Result<void>>();
  const bool in_time = proc::run_beside(
      awake,
      [result, &process, wanted, kLockTimeout] {
        *result = process.bring_to(wanted, kLockTimeout);
      },
      limit);
  Result<void> held;
  for (proc::AwakeThread& thread : awake)
    held = thread.stop();
  if (!in_time) {
    return fail(ErrorCode::kNoAnswer,
                fmt::format("the driver has not answered about process {} for {} ms",
                            process.pid().value, limit.count()),
                fmt::format("see `dmesg` for messages of the NVIDIA driver; then run `stasis "
                            "recover {}`",
                            process.pid().value));
  }
  if (!*result) return std::move(*result);
  if (!held) return held;
  return stopped ? process.pidfd().signal(SIGCONT) : Result<void>();
}

}  // namespace

Result<void> bring_stopped_to(Process& process, CudaState wanted, std::chrono::milliseconds limit) {
  return trace_on_own_thread([&] { return bring_to(process, wanted, limit); });
}

}  // namespace stasis
