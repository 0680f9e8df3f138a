#include "proc/file_state.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/scope_guard.h"
#include "proc/descriptors.h"
#include "proc/procfs.h"
#include "proc/served_files.h"
#include "proc/terminal_state.h"

namespace stasis::proc {
namespace {

// linux/eventpoll.h, since Linux 6.9
struct PollParameters {
  std::uint32_t microseconds = 0;
  std::uint16_t budget = 0;
  std::uint8_t prefer = 0;
  std::uint8_t padding = 0;
};
constexpr unsigned long kSetParameters = _IOW(0x8A, 0x01, PollParameters);
constexpr unsigned long kGetParameters = _IOR(0x8A, 0x02, PollParameters);

constexpr const char* kEpoll = "anon_inode:[eventpoll]";
constexpr const char* kInotify = "anon_inode:inotify";
constexpr const char* kFanotify = "anon_inode:[fanotify]";
constexpr const char* kEventfd = "anon_inode:[eventfd]";
constexpr int kHalf = 32;  // bits of an eventfd's value, of which CRIU restores the lower one

// admin-guide/devices.txt of the kernel: consoles and serial lines, /dev/tty and /dev/ptmx, slaves.
bool is_terminal(const struct stat& status) {
  const unsigned first = major(status.st_rdev);
  return S_ISCHR(status.st_mode) && (first == 4 || first == 5 || (first >= 136 && first <= 143));
}

// Which files the kernel signals of. Others' copies may not be made: closing one can wait.
bool may_signal(Pid pid, const OpenFile& file) {
  if (file.path.starts_with("pipe:[") || file.path.starts_with("socket:[") ||
      file.path == kInotify || file.path == kFanotify)
    return true;
  if (!file.path.starts_with('/')) return false;
  const auto status = known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
  return status && (S_ISFIFO(status->st_mode) || is_terminal(*status));
}

// struct termios of asm-generic/termbits.h, which the C library's own is not.
constexpr std::size_t kKernelTermios = 36;
using TerminalSettings = std::array<char, 64>;

std::string settings_if_locked(const UniqueFd& terminal) {
  TerminalSettings locks{};
  TerminalSettings settings{};
  const auto is_set = [](char byte) { return byte != 0; };
  if (::ioctl(terminal.get(), TIOCGLCKTRMIOS, locks.data()) != 0 ||
      std::none_of(locks.begin(), locks.end(), is_set) ||
      ::ioctl(terminal.get(), TCGETS, settings.data()) != 0)
    return {};
  return {settings.data(), kKernelTermios};
}

// CRIU locks first, and then sets what the lock keeps it from setting (do_restore_tty_parms()).
bool set_despite_lock(const UniqueFd& terminal, const std::string& wanted) {
  TerminalSettings locks{};
  const TerminalSettings none{};
  TerminalSettings settings{};
  wanted.copy(settings.data(), kKernelTermios);
  const int fd = terminal.get();
  if (::ioctl(fd, TIOCGLCKTRMIOS, locks.data()) != 0 ||
      ::ioctl(fd, TIOCSLCKTRMIOS, none.data()) != 0)
    return false;
  const bool set = ::ioctl(fd, TCSETS, settings.data()) == 0;
  const int why = errno;
  if (::ioctl(fd, TIOCSLCKTRMIOS, locks.data()) != 0) return false;
  errno = why;
  return set;
}

// "eventfd-count:        100000005", of proc_pid_fdinfo(5); nothing of another file.
std::optional<std::uint64_t> eventfd_value(const std::string& process, int descriptor) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", process, descriptor));
  if (!text) return std::nullopt;
  constexpr std::string_view kCount = "eventfd-count:";
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    std::uint64_t value = 0;
    if (line.starts_with(kCount) &&
        (std::istringstream(line.substr(kCount.size())) >> std::hex >> value))
      return value;
  }
  return std::nullopt;
}

// A copy by another descriptor, or in another process, may have been set already.
bool set_upper_half(const UniqueFd& eventfd, std::uint64_t wanted) {
  const auto now = eventfd_value("self", eventfd.get());
  if (!now) {
    errno = EBADF;
    return false;
  }
  const std::uint64_t value = (wanted << kHalf) | (*now & ((std::uint64_t{1} << kHalf) - 1));
  if (value <= *now) return true;
  // The kernel lets no value come to all ones: a write that would waits.
  constexpr std::uint64_t kMost = ~std::uint64_t{1};
  const std::uint64_t more = std::min(value, kMost) - *now;
  return ::write(eventfd.get(), &more, sizeof more) == sizeof more;
}

constexpr mode_t kModeBits = 07777;
constexpr mode_t kUsualPipe = 0600;

bool is_nameless_pipe(const UniqueFd& copy) {
  struct statfs system {};
  return ::fstatfs(copy.get(), &system) == 0 && system.f_type == PIPEFS_MAGIC;
}

// CRIU makes each as the user who restores.
void note_pipe(const UniqueFd& copy, FileState& state) {
  struct stat info {};
  if (!is_nameless_pipe(copy) || ::fstat(copy.get(), &info) != 0) return;
  if ((info.st_mode & kModeBits) != kUsualPipe) state.mode = info.st_mode & kModeBits;
  if (info.st_uid == ::geteuid() && info.st_gid == ::getegid()) return;
  state.uid = info.st_uid;
  state.gid = info.st_gid;
}

// The other end, or a copy in another process, may have been set already.
bool set_pipe(const UniqueFd& copy, const FileState& wanted) {
  struct stat info {};
  if (!is_nameless_pipe(copy)) {
    errno = EBADF;
    return false;
  }
  if (::fstat(copy.get(), &info) != 0) return false;
  const uid_t uid = wanted.uid.value_or(info.st_uid);
  const gid_t gid = wanted.gid.value_or(info.st_gid);
  if ((uid != info.st_uid || gid != info.st_gid) && ::fchown(copy.get(), uid, gid) != 0)
    return false;
  const mode_t mode = wanted.mode.value_or(info.st_mode & kModeBits);
  return mode == (info.st_mode & kModeBits) || ::fchmod(copy.get(), mode) == 0;
}

Tid owner_thread(const UniqueFd& copy) {
  f_owner_ex owner{};
  const bool is_thread =
      ::fcntl(copy.get(), F_GETOWN_EX, &owner) == 0 && owner.type == F_OWNER_TID && owner.pid > 0;
  return Tid{is_thread ? owner.pid : 0};
}

}  // namespace

std::vector<FileState> file_states(Pid pid) {
  std::vector<FileState> out;
  const auto files = ProcFs().open_files(pid);
  const auto process = Pidfd::open(pid);
  if (!files || !process) return out;
  DroppedCopies dropped;
  for (const OpenFile& file : *files) {
    if (file.path == kEventfd) {
      const auto value = eventfd_value(std::to_string(pid.value), file.descriptor).value_or(0);
      if (value >> kHalf == 0) continue;
      FileState& state = out.emplace_back();
      state.descriptor = file.descriptor;
      state.value_high = static_cast<std::uint32_t>(value >> kHalf);
      continue;
    }
    const bool is_epoll = file.path == kEpoll;
    if (!is_epoll && !may_signal(pid, file)) continue;
    // A server has thousands of connections, and stands still meanwhile.
    auto copy = file.path.starts_with('/') ? take_descriptor(pid, *process, file.descriptor)
                                           : take_nameless(pid, *process, file.descriptor);
    if (!copy) continue;
    const ScopeGuard drop([&] { dropped.add(std::move(*copy)); });
    FileState state;
    PollParameters polling;
    int exclusive = 0;
    if (is_epoll && ::ioctl(copy->get(), kGetParameters, &polling) == 0) {
      state.polling = {polling.microseconds, polling.budget, polling.prefer != 0};
    } else if (file.path.starts_with('/') && ::ioctl(copy->get(), TIOCGEXCL, &exclusive) == 0) {
      state.exclusive = exclusive != 0;
      state.locked_settings = settings_if_locked(*copy);
    }
    if (file.path.starts_with("pipe:[")) note_pipe(*copy, state);
    const int flags = ::fcntl(copy->get(), F_GETFL);
    state.signals = flags >= 0 && (flags & O_ASYNC) != 0;
    state.owner_thread = owner_thread(*copy);
    if (state == FileState{}) continue;
    state.descriptor = file.descriptor;
    out.push_back(state);
  }
  return out;
}

std::vector<int> watched_folders(Pid pid) {
  std::vector<int> out;
  const auto files = ProcFs().open_files(pid);
  const auto process = Pidfd::open(pid);
  if (!files || !process) return out;
  for (const OpenFile& file : *files) {
    if (!file.path.starts_with('/')) continue;
    const auto status = known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
    if (!status || !S_ISDIR(status->st_mode)) continue;
    const auto copy = take_descriptor(pid, *process, file.descriptor);
    f_owner_ex owner{};
    if (copy && ::fcntl(copy->get(), F_GETOWN_EX, &owner) == 0 && owner.pid != 0)
      out.push_back(file.descriptor);
  }
  return out;
}

Result<void> set_file_state(Pid pid, const Pidfd& process, const FileState& state) {
  const bool is_locked = !state.locked_settings.empty();
  const bool is_pipe = state.mode || state.uid || state.gid;
  const bool is_terminal =
      state.is_stopped || state.has_typed_stop || state.input_speed != 0 || state.output_speed != 0;
  if (!state.exclusive && !is_locked && state.polling == EpollPolling{} && state.value_high == 0 &&
      !is_pipe && !is_terminal)
    return {};
  STASIS_TRY_ASSIGN(auto copy, take_descriptor(pid, process, state.descriptor));
  const PollParameters polling{state.polling.microseconds, state.polling.budget,
                               static_cast<std::uint8_t>(state.polling.prefer ? 1 : 0), 0};
  bool done = true;
  if (state.polling != EpollPolling{}) done = ::ioctl(copy.get(), kSetParameters, &polling) == 0;
  if (state.value_high != 0) done = set_upper_half(copy, state.value_high);
  if (is_locked) done = set_despite_lock(copy, state.locked_settings);
  if (is_pipe) done = set_pipe(copy, state);
  if (is_terminal) done = set_terminal(copy, state) && done;
  if (state.exclusive) done = ::ioctl(copy.get(), TIOCEXCL) == 0 && done;
  if (done) return {};
  return fail(errno_error(
      fmt::format("cannot set descriptor {} of process {}", state.descriptor, pid.value), errno));
}

}  // namespace stasis::proc
