#include "operations/awaited_lock.h"

#include <fcntl.h>
#include <linux/limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/printable.h"
#include "proc/lock_holder.h"
#include "proc/procfs.h"
#include "proc/served_files.h"

namespace stasis {
namespace {

// The number of the call and its first two arguments (proc_pid_syscall(5)): "73 0x9 0x2 ...".
std::optional<std::array<std::uint64_t, 3>> call_of(Pid pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/syscall", pid.value));
  if (!text) return std::nullopt;
  std::array<std::uint64_t, 3> out{};
  std::string_view rest = *text;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i > 0 && !rest.starts_with("0x")) return std::nullopt;  // "running"
    if (i > 0) rest.remove_prefix(2);
    const auto read =
        std::from_chars(rest.data(), rest.data() + rest.size(), out[i], i == 0 ? 10 : 16);
    if (read.ec != std::errc()) return std::nullopt;
    rest.remove_prefix(static_cast<std::size_t>(read.ptr - rest.data()));
    if (rest.starts_with(' ')) rest.remove_prefix(1);
  }
  return out;
}

bool waits_for_lock(const std::array<std::uint64_t, 3>& call) {
  if (call[0] == SYS_flock) return true;
  return call[0] == SYS_fcntl && (call[2] == F_SETLKW || call[2] == F_OFD_SETLKW);
}

std::string holder_of(const std::string& link) {
  // Not asked itself: it may be on a file system that does not answer.
  const auto status = proc::known_status(link);
  const auto holder = status ? proc::lock_holder(*status) : std::optional<Pid>();
  const auto process = holder ? proc::ProcFs().process(*holder) : Result<proc::ProcessInfo>();
  if (!holder || !process) return "which another program holds";
  return fmt::format("which process {} ({}) holds", holder->value, printable(process->comm));
}

}  // namespace

std::optional<std::string> awaited_lock(std::span<const Pid> processes) {
  for (const Pid pid : processes) {
    const auto call = call_of(pid);
    if (!call || !waits_for_lock(*call)) continue;
    const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, (*call)[1]);
    std::array<char, PATH_MAX> path{};
    const ssize_t size = ::readlink(link.c_str(), path.data(), path.size());
    if (size <= 0) continue;
    return fmt::format("the lock of {}, {}",
                       printable(std::string(path.data(), static_cast<std::size_t>(size))),
                       holder_of(link));
  }
  return std::nullopt;
}

}  // namespace stasis
