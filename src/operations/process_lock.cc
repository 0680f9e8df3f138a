#include "operations/process_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "proc/lock_holder.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

// A helper process that has just been forked from a tool that ends has its descriptors for a
// moment.
constexpr int kProcessLockTries = 50;
constexpr std::chrono::milliseconds kProcessLockPause{4};

Error is_locked(Pid pid, const UniqueFd& file) {
  const auto holder = proc::lock_holder(file);
  if (!holder) {
    return {
        ErrorCode::kBusy,
        fmt::format("a stasis that cannot be seen from here is working on process {}", pid.value),
        "wait for it to end; it may be in another container"};
  }
  if (const auto process = proc::ProcFs().process(*holder); process && !proc::is_tool(*process)) {
    return {ErrorCode::kBusy,
            fmt::format("process {} ({}), which is no stasis, holds a lock on /proc/{}/environ, by "
                        "which a stasis keeps others from a process",
                        holder->value, process->comm, pid.value),
            fmt::format("end it (`kill {}`), or have it give the lock up", holder->value)};
  }
  return busy_with(fmt::format("another stasis, process {},", holder->value), *holder, pid);
}

}  // namespace

Result<std::vector<UniqueFd>> lock_processes(const std::vector<Pid>& pids) {
  std::vector<UniqueFd> locks;
  for (const Pid pid : pids) {
    auto file = open_file(AT_FDCWD, fmt::format("/proc/{}/environ", pid.value), O_RDONLY);
    if (!file) continue;
    for (int tries = 0; ::flock(file->get(), LOCK_EX | LOCK_NB) != 0; ++tries) {
      if (errno != EWOULDBLOCK && errno != EINTR) break;
      if (tries >= kProcessLockTries) {
        return fail(is_locked(pid, *file));
      }
      std::this_thread::sleep_for(kProcessLockPause);
    }
    locks.push_back(std::move(*file));
  }
  return locks;
}

}  // namespace stasis
