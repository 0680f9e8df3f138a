#include "proc/terminal_state.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <compare>
#include <map>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "proc/descriptors.h"
#include "proc/procfs.h"
#include "proc/served_files.h"

namespace stasis::proc {
namespace {

// struct termios2 of asm-generic/termbits.h, which the C library does not have.
struct SettingsWithSpeeds {
  std::uint32_t input = 0;
  std::uint32_t output = 0;
  std::uint32_t control = 0;
  std::uint32_t local = 0;
  std::uint8_t discipline = 0;
  std::array<std::uint8_t, 19> characters{};
  std::uint32_t input_speed = 0;
  std::uint32_t output_speed = 0;
};
constexpr unsigned long kGetSettings = _IOR('T', 0x2A, SettingsWithSpeeds);
constexpr unsigned long kSetSettings = _IOW('T', 0x2B, SettingsWithSpeeds);
constexpr std::uint32_t kNamelessSpeed = 0010000;  // BOTHER
constexpr std::uint32_t kSpeedBits = 0010017;      // CBAUD
constexpr unsigned kInputShift = 16;               // IBSHIFT

constexpr unsigned long kOpenSlave = _IO('T', 0x41);  // TIOCGPTPEER

// What a reader leaves before the kernel gives it more (TTY_THRESHOLD_UNTHROTTLE of n_tty.c).
constexpr int kAlmostNothing = 128;

bool takes_output(const UniqueFd& end) {
  pollfd state{end.get(), POLLOUT, 0};
  return ::poll(&state, 1, 0) == 1 && (state.revents & POLLOUT) != 0;
}

// A terminal whose other end takes what is written has room.
bool may_be_full(const UniqueFd& other) {
  int unread = 0;
  return ::ioctl(other.get(), FIONREAD, &unread) != 0 || unread > kAlmostNothing;
}

enum class Flow { kGoesOn, kStopped, kTyped, kUnknown };

// `is_packets`: of each stop and start the other end is told.
Flow flow_of(const UniqueFd& end, const UniqueFd& other, bool is_packets) {
  if (takes_output(end)) return Flow::kGoesOn;
  // The kernel gives a reader that has just read the rest a moment later.
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  if (takes_output(end)) return Flow::kGoesOn;
  if (may_be_full(other) || is_packets) return Flow::kUnknown;
  // Lets that go on which TCOOFF has stopped, and nothing else.
  if (::ioctl(end.get(), TCXONC, TCOON) != 0) return Flow::kUnknown;
  if (!takes_output(end)) return Flow::kTyped;
  return ::ioctl(end.get(), TCXONC, TCOOFF) == 0 ? Flow::kStopped : Flow::kUnknown;
}

struct TerminalKey {
  dev_t instance = 0;
  int index = -1;
  auto operator<=>(const TerminalKey&) const = default;
};

struct TerminalEnd {
  Pid pid;
  int descriptor = -1;
};

struct TerminalEnds {
  std::optional<TerminalEnd> master;
  std::optional<TerminalEnd> slave;
};

Result<UniqueFd> copy_of(const TerminalEnd& end) {
  STASIS_TRY_ASSIGN(const auto process, Pidfd::open(end.pid));
  return take_descriptor(end.pid, process, end.descriptor,
                         [](const struct stat& info) { return is_master(info) || is_slave(info); });
}

int index_of(const TerminalEnd& master) {
  int index = -1;
  const auto copy = copy_of(master);
  return copy && ::ioctl(copy->get(), TIOCGPTN, &index) == 0 ? index : -1;
}

std::map<TerminalKey, TerminalEnds> terminals_of(std::span<const Pid> tree) {
  std::map<TerminalKey, TerminalEnds> out;
  const ProcFs procfs;
  for (const Pid pid : tree) {
    const auto files = procfs.open_files(pid);
    if (!files) continue;
    for (const OpenFile& file : *files) {
      if (!file.path.starts_with("/dev/") || file.path.ends_with(" (deleted)")) continue;
      const auto status = known_status(fmt::format("/proc/{}/fd/{}", pid.value, file.descriptor));
      if (!status) continue;
      const TerminalEnd end{pid, file.descriptor};
      if (is_slave(*status)) {
        auto& slave = out[{status->st_dev, index_of_slave(*status)}].slave;
        if (!slave) slave = end;
      } else if (is_master(*status)) {
        const TerminalKey key{instance_of_master(pid, file.descriptor), index_of(end)};
        if (key.instance == 0 || key.index < 0) continue;
        auto& master = out[key].master;
        if (!master) master = end;
      }
    }
  }
  return out;
}

void note(const TerminalEnds& ends, TerminalStates& out) {
  const auto master = copy_of(*ends.master);
  const auto slave = copy_of(*ends.slave);
  if (!master || !slave) return;
  FileState of_master;
  of_master.descriptor = ends.master->descriptor;
  FileState of_slave;
  of_slave.descriptor = ends.slave->descriptor;
  int packets = 0;
  const bool is_packets = ::ioctl(master->get(), TIOCGPKT, &packets) == 0 && packets != 0;
  switch (flow_of(*slave, *master, is_packets)) {
    case Flow::kGoesOn:
      break;
    case Flow::kStopped:
      of_slave.is_stopped = true;
      break;
    case Flow::kTyped:
      of_master.has_typed_stop = true;
      break;
    case Flow::kUnknown:
      out.unknown.emplace_back(ends.slave->pid, of_slave.descriptor);
      break;
  }
  switch (flow_of(*master, *slave, false)) {
    case Flow::kGoesOn:
      break;
    case Flow::kStopped:
      of_master.is_stopped = true;
      break;
    case Flow::kTyped:
    case Flow::kUnknown:
      out.unknown.emplace_back(ends.master->pid, of_master.descriptor);
      break;
  }
  SettingsWithSpeeds settings;
  if (::ioctl(master->get(), kGetSettings, &settings) == 0) {
    const auto is_nameless = [](std::uint32_t bits) {
      return (bits & kSpeedBits) == kNamelessSpeed;
    };
    if (is_nameless(settings.control) || is_nameless(settings.control >> kInputShift)) {
      of_master.input_speed = settings.input_speed;
      of_master.output_speed = settings.output_speed;
    }
  }
  const auto is_set = [](const FileState& state) {
    FileState none;
    none.descriptor = state.descriptor;
    return state != none;
  };
  if (is_set(of_master)) out.states.emplace_back(ends.master->pid, of_master);
  if (is_set(of_slave)) out.states.emplace_back(ends.slave->pid, of_slave);
}

bool set_speeds(const UniqueFd& master, std::uint32_t input, std::uint32_t output) {
  SettingsWithSpeeds settings;
  if (::ioctl(master.get(), kGetSettings, &settings) != 0) return false;
  settings.input_speed = input;
  settings.output_speed = output;
  return ::ioctl(master.get(), kSetSettings, &settings) == 0;
}

// Of a terminal that a TCOOFF has stopped no typed start lets output go on, so that one which was
// stopped by what was typed is stopped so again.
bool type_stop(const UniqueFd& master) {
  SettingsWithSpeeds settings;
  if (::ioctl(master.get(), kGetSettings, &settings) != 0) return false;
  const std::uint8_t stop = settings.characters[VSTOP];
  if ((settings.input & IXON) == 0 || (settings.local & EXTPROC) != 0 || stop == _POSIX_VDISABLE) {
    errno = EOPNOTSUPP;
    return false;
  }
  // What is open already: to close this changes nothing.
  const UniqueFd slave(
      ::ioctl(master.get(), kOpenSlave, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
  if (!slave.valid() || !takes_output(master)) {
    if (slave.valid()) errno = EAGAIN;
    return false;
  }
  if (!takes_output(slave)) return true;
  if (::write(master.get(), &stop, 1) != 1) return false;
  constexpr auto kLong = std::chrono::seconds(1);
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  // It is taken on another thread of the kernel's.
  while (takes_output(slave)) {
    if (std::chrono::steady_clock::now() >= deadline) {
      errno = ETIMEDOUT;
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

bool is_master(const struct stat& status) {
  return S_ISCHR(status.st_mode) && major(status.st_rdev) == kPtmxMajor &&
         minor(status.st_rdev) == kPtmxMinor;
}

bool is_slave(const struct stat& status) {
  const unsigned first = major(status.st_rdev);
  return S_ISCHR(status.st_mode) && first >= kSlaveFirst && first <= kSlaveLast;
}

int index_of_slave(const struct stat& status) {
  return static_cast<int>((major(status.st_rdev) - kSlaveFirst) * kPerMajor +
                          minor(status.st_rdev));
}

// Of a master that is not on a devpts itself, the one beside it.
dev_t instance_of_master(Pid pid, int descriptor) {
  const std::string link = fmt::format("/proc/{}/fd/{}", pid.value, descriptor);
  const auto system = file_system_of(pid, link);
  const bool on_devpts = system && system->f_type == DEVPTS_SUPER_MAGIC;
  const std::string place = on_devpts ? link : fmt::format("/proc/{}/root/dev/pts", pid.value);
  // The process's root may be on any file system.
  const bool is_ours =
      answers(pid, fmt::format("/proc/{}/root", pid.value)) && !leads_over_served(pid, "/dev/pts");
  if (!on_devpts && !is_ours) return 0;
  const auto info = known_status(place);
  return info ? info->st_dev : 0;
}

TerminalStates terminal_states(std::span<const Pid> tree) {
  TerminalStates out;
  for (const auto& [key, ends] : terminals_of(tree))
    if (ends.master && ends.slave) note(ends, out);
  return out;
}

bool set_terminal(const UniqueFd& copy, const FileState& wanted) {
  bool done = true;
  if (wanted.input_speed != 0 || wanted.output_speed != 0)
    done = set_speeds(copy, wanted.input_speed, wanted.output_speed);
  if (wanted.has_typed_stop) done = type_stop(copy) && done;
  if (wanted.is_stopped) done = ::ioctl(copy.get(), TCXONC, TCOOFF) == 0 && done;
  return done;
}

}  // namespace stasis::proc
