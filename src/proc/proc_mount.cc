#include "proc/proc_mount.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "proc/mounts.h"

namespace stasis::proc {
namespace {

constexpr const char* kMountIt =
    "mount the /proc of this PID namespace: `mount -t proc proc /proc`, or start it with `unshare "
    "--pid --fork --mount-proc`";

// The numbers of this process, from the namespace of /proc to its own one, or the first of them
// where the kernel does not list them (gVisor); empty if /proc does not know it.
std::string own_numbers() {
  const auto status = read_file(AT_FDCWD, "/proc/self/status");
  if (!status) return {};
  std::istringstream lines(*status);
  for (std::string line; std::getline(lines, line);) {
    constexpr std::string_view kNumbers = "NSpid:\t";
    if (line.starts_with(kNumbers)) return line.substr(kNumbers.size());
  }
  char self[32];
  const ssize_t length = ::readlink("/proc/self", self, sizeof self);
  return {self, static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

bool is_shown(Pid pid) { return ::access(fmt::format("/proc/{}", pid.value).c_str(), F_OK) == 0; }

}  // namespace

Result<void> check_proc_mount() {
  static std::atomic<pid_t> found_right{0};
  const pid_t self = ::getpid();
  if (found_right == self) return {};
  if (own_numbers() == std::to_string(self)) {
    found_right = self;
    return {};
  }
  struct statfs info {};
  if (::statfs("/proc", &info) != 0 || info.f_type != PROC_SUPER_MAGIC)
    return fail(refusal({"proc", Severity::kRed, {}, "/proc is not mounted here", kMountIt}));
  return fail(
      refusal({"proc",
               Severity::kRed,
               {},
               "the /proc that is mounted here is that of another PID namespace: its numbers mean "
               "other processes",
               kMountIt}));
}

bool proc_may_hide() {
  static const bool may = [] {
    const auto all = mounts("self");
    if (!all) return false;
    std::string options;  // of the last, which lies on the others
    for (const Mount& mount : *all)
      if (mount.type == "proc" && mount.point == "/proc") options = mount.options;
    std::istringstream words(options);
    for (std::string word; std::getline(words, word, ',');)
      if (word.starts_with("hidepid=") && word != "hidepid=0" && word != "hidepid=off") return true;
    return false;
  }();
  return may;
}

bool proc_hides_others() { return proc_may_hide() && ::access("/proc/1/stat", R_OK) != 0; }

bool is_hidden(Pid pid) {
  if (pid.value <= 0 || is_shown(pid)) return false;
  const bool exists = ::kill(pid.value, 0) == 0 || errno == EPERM;
  // Again, as it may have been made in between.
  return exists && !is_shown(pid);
}

Error hidden(Pid pid) {
  return refusal(
      {"proc", Severity::kRed, pid,
       fmt::format("process {} is another user's, or may not be examined, and /proc hides "
                   "it (it is mounted with hidepid)",
                   pid.value),
       "run as root, or as the user who owns the process"},
      ErrorCode::kNotPermitted);
}

}  // namespace stasis::proc
