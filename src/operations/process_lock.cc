#include "operations/process_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "checkpoint/journal.h"

namespace stasis {
namespace {

// A helper process that has just been forked from a tool that ends has its descriptors for a
// moment.
constexpr int kProcessLockTries = 50;
constexpr std::chrono::milliseconds kProcessLockPause{4};

// As far as /proc/locks shows it: not one of another PID namespace.
std::optional<Pid> holder_of(const UniqueFd& file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return std::nullopt;
  const std::string inode = fmt::format(":{}", status.st_ino);
  std::ifstream locks("/proc/locks");
  std::string number, kind, advisory, access, place;
  pid_t pid = 0;
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    if (!(fields >> number >> kind >> advisory >> access >> pid >> place)) continue;
    if (kind == "FLOCK" && pid > 0 && place.ends_with(inode)) return Pid{pid};
  }
  return std::nullopt;
}

Error is_locked(Pid pid, const UniqueFd& file) {
  const auto holder = holder_of(file);
  if (!holder) {
    return {
        ErrorCode::kBusy,
        fmt::format("a stasis that cannot be seen from here is working on process {}", pid.value),
        "wait for it to end; it may be in another container"};
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
