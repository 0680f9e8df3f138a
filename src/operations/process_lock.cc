#include "operations/process_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "proc/procfs.h"

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
  const std::string file_place =
      fmt::format("{:02x}:{:02x}:{}", major(status.st_dev), minor(status.st_dev), status.st_ino);
  std::ifstream locks("/proc/locks");
  std::string number, kind, advisory, access, place;
  pid_t pid = 0;
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    if (!(fields >> number >> kind >> advisory >> access >> pid >> place)) continue;
    if (kind == "FLOCK" && pid > 0 && place == file_place) return Pid{pid};
  }
  return std::nullopt;
}

// By its program: ours, one of that name, or one that acts by our library, as Python's.
bool is_stasis(const proc::ProcessInfo& process) {
  struct stat its {};
  struct stat ours {};
  const std::string program = fmt::format("/proc/{}/exe", process.pid.value);
  if (::stat(program.c_str(), &its) == 0 && ::stat("/proc/self/exe", &ours) == 0 &&
      its.st_dev == ours.st_dev && its.st_ino == ours.st_ino)
    return true;
  std::error_code failed;
  const auto name = std::filesystem::read_symlink(program, failed).filename().string();
  const auto has_library = proc::ProcFs().maps_file(process.pid, "libstasis.so");
  return process.comm.starts_with("stasis") || name.starts_with("stasis") ||
         (has_library && *has_library);
}

Error is_locked(Pid pid, const UniqueFd& file) {
  const auto holder = holder_of(file);
  if (!holder) {
    return {
        ErrorCode::kBusy,
        fmt::format("a stasis that cannot be seen from here is working on process {}", pid.value),
        "wait for it to end; it may be in another container"};
  }
  if (const auto process = proc::ProcFs().process(*holder); process && !is_stasis(*process)) {
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
