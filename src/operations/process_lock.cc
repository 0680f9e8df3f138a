#include "operations/process_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include <fmt/format.h>

namespace stasis {
namespace {

// A helper process that has just been forked from a tool that ends has its descriptors for a
// moment.
constexpr int kProcessLockTries = 50;
constexpr std::chrono::milliseconds kProcessLockPause{4};

}  // namespace

Result<std::vector<UniqueFd>> lock_processes(const std::vector<Pid>& pids) {
  std::vector<UniqueFd> locks;
  for (const Pid pid : pids) {
    auto file = open_file(AT_FDCWD, fmt::format("/proc/{}/environ", pid.value), O_RDONLY);
    if (!file) continue;
    for (int tries = 0; ::flock(file->get(), LOCK_EX | LOCK_NB) != 0; ++tries) {
      if (errno != EWOULDBLOCK && errno != EINTR) break;
      if (tries >= kProcessLockTries) {
        return fail(ErrorCode::kBusy,
                    fmt::format("a stasis of another user, or with another state directory, is "
                                "working on process {}",
                                pid.value),
                    fmt::format("wait for it to end; `grep :$(stat -c %i /proc/{}/environ) "
                                "/proc/locks` shows its number",
                                pid.value));
      }
      std::this_thread::sleep_for(kProcessLockPause);
    }
    locks.push_back(std::move(*file));
  }
  return locks;
}

}  // namespace stasis
