// Long because flow, speeds and what is not yet read of a terminal are all asked and set through
// copies of its two ends, by the same helpers.
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

#include <algorithm>
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

// Any that CRIU saves as one: a pseudo terminal, /dev/tty, a console, a serial line.
bool is_any_terminal(const struct stat& status) {
  constexpr std::array<unsigned, 4> kOthers = {4, 5, 188, 204};
  return is_slave(status) ||
         (S_ISCHR(status.st_mode) &&
          std::find(kOthers.begin(), kOthers.end(), major(status.st_rdev)) != kOthers.end());
}

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

// Of which terminal that descriptor is an end.
std::optional<TerminalKey> key_of(const TerminalEnd& end, const struct stat& status) {
  if (is_slave(status)) return TerminalKey{status.st_dev, index_of_slave(status)};
  if (!is_master(status)) return std::nullopt;
  const TerminalKey key{instance_of_master(end.pid, end.descriptor), index_of(end)};
  return key.instance != 0 && key.index >= 0 ? std::optional(key) : std::nullopt;
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
      const auto key = key_of(end, *status);
      if (!key) continue;
      auto& place = is_slave(*status) ? out[*key].slave : out[*key].master;
      if (!place) place = end;
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

// What a reader of a terminal has at once; the rest waits in another buffer (N_TTY_BUF_SIZE).
constexpr std::size_t kAtOnce = 4000;

int unread_of(const UniqueFd& end) {
  int unread = 0;
  return ::ioctl(end.get(), FIONREAD, &unread) == 0 ? unread : 0;
}

// A terminal in whose place another is set for a while: what is written to one end comes out of the
// other as it is, and all that is in it can be read.
class PlainTerminal {
 public:
  explicit PlainTerminal(const UniqueFd& end) : end_(end) {
    is_known_ = ::ioctl(end.get(), kGetSettings, &before_) == 0;
    int packets = 0;
    is_packets_ = ::ioctl(end.get(), TIOCGPKT, &packets) == 0 && packets != 0;
    struct stat status {};
    is_slave_ = ::fstat(end.get(), &status) == 0 && is_slave(status);
  }
  ~PlainTerminal() {
    if (is_known_) (void)::ioctl(end_.get(), kSetSettings, &before_);
  }
  PlainTerminal(const PlainTerminal&) = delete;
  PlainTerminal& operator=(const PlainTerminal&) = delete;

  // What is typed can be read when it is a line.
  bool has_lines() const { return is_slave_ && (before_.local & ICANON) != 0; }

  // Also a line that is not finished.
  std::string take_all() {
    std::string out;
    // What is in a slave would be one line afterwards.
    if (!set(is_slave_ ? 0 : before_.local & ICANON)) return out;
    // What was just written comes a moment later.
    for (int empty = 0; empty < 2;) {
      const std::string some = take_some();
      out += some;
      if (!some.empty()) {
        empty = 0;
        continue;
      }
      ++empty;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return out;
  }
  bool become_plain() { return set(before_.local & ICANON); }
  // That ends what is read, and no line.
  static constexpr char kEnd = 4;

 private:
  bool set(std::uint32_t lines) {
    SettingsWithSpeeds plain = before_;
    // EXTPROC, IXON and its characters stay: a master in packet mode is told when they change, and
    // without IXON output goes on that was stopped.
    plain.input = before_.input & IXON;
    plain.output &= ~static_cast<std::uint32_t>(OPOST);
    plain.local = (before_.local & EXTPROC) | lines;
    plain.characters.fill(_POSIX_VDISABLE);
    if (lines != 0) {
      plain.characters[VEOF] = kEnd;
    } else {
      plain.characters[VMIN] = 0;
      plain.characters[VTIME] = 0;
    }
    for (const std::size_t which : {std::size_t{VSTOP}, std::size_t{VSTART}})
      plain.characters[which] = before_.characters[which];
    return is_known_ && ::ioctl(end_.get(), kSetSettings, &plain) == 0;
  }

  // Of a master in packet mode a read begins with what has happened, and has nothing else if it is
  // something.
  std::string take_some() {
    const int unread = unread_of(end_);
    if (unread <= 0) return {};
    std::string out(static_cast<std::size_t>(unread) + 1, '\0');
    const ssize_t size = ::read(end_.get(), out.data(), out.size() - (is_packets_ ? 0 : 1));
    out.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    if (is_packets_ && !out.empty()) out.erase(0, 1);
    return out;
  }

  const UniqueFd& end_;
  SettingsWithSpeeds before_;
  bool is_known_ = false;
  bool is_packets_ = false;
  bool is_slave_ = false;
};

// An end of which no read and no write waits, also where more is to be written than there is room
// for, or another process reads there, too.
class NotWaiting {
 public:
  explicit NotWaiting(const UniqueFd& end) : end_(end), before_(::fcntl(end.get(), F_GETFL)) {
    if (before_ >= 0) (void)::fcntl(end.get(), F_SETFL, before_ | O_NONBLOCK);
  }
  ~NotWaiting() {
    if (before_ >= 0) (void)::fcntl(end_.get(), F_SETFL, before_);
  }
  NotWaiting(const NotWaiting&) = delete;
  NotWaiting& operator=(const NotWaiting&) = delete;

 private:
  const UniqueFd& end_;
  int before_;
};

// By the other end, as far as it has room: false for a part, too.
bool write_to(const UniqueFd& other, const std::string& unread) {
  // The kernel makes room a moment later, on another thread.
  constexpr auto kLong = std::chrono::milliseconds(200);
  auto deadline = std::chrono::steady_clock::now() + kLong;
  std::size_t done = 0;
  while (done < unread.size()) {
    constexpr std::size_t kPiece = 1024;
    const ssize_t now =
        ::write(other.get(), unread.data() + done, std::min(kPiece, unread.size() - done));
    if (now > 0) {
      done += static_cast<std::size_t>(now);
      deadline = std::chrono::steady_clock::now() + kLong;
      continue;
    }
    const bool is_full = now == 0 || errno == EAGAIN;
    if (!is_full) return false;
    if (std::chrono::steady_clock::now() >= deadline) {
      errno = EAGAIN;
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Into the end itself, past the other one, to which nothing can be written while it is stopped.
bool type_into(const UniqueFd& end, const std::string& unread) {
  if (unread.size() > kAtOnce) {
    errno = EAGAIN;
    return false;
  }
  return std::all_of(unread.begin(), unread.end(),
                     [&](char letter) { return ::ioctl(end.get(), TIOCSTI, &letter) == 0; });
}

// Of a master in packet mode CRIU has what has happened, 0 for nothing, in front of the rest.
std::string without_status(const UniqueFd& master, const std::string& unread) {
  int packets = 0;
  if (::ioctl(master.get(), TIOCGPKT, &packets) != 0 || packets == 0) return unread;
  const std::size_t data = unread.find('\0');
  return data == std::string::npos ? std::string() : unread.substr(data + 1);
}

void wait_for_unread(const UniqueFd& end, std::size_t size) {
  constexpr auto kLong = std::chrono::milliseconds(200);
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  const int wanted = static_cast<int>(std::min(size, kAtOnce));
  while (unread_of(end) < wanted && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

Result<void> set_terminal_flags(Pid pid, int descriptor, unsigned flags, bool goes_on_signalling) {
  constexpr unsigned kSettable = O_APPEND | O_ASYNC | O_DIRECT | O_NOATIME | O_NONBLOCK;
  STASIS_TRY_ASSIGN(const auto process, Pidfd::open(pid));
  STASIS_TRY_ASSIGN(const auto copy, take_descriptor(pid, process, descriptor, is_any_terminal));
  const int now = ::fcntl(copy.get(), F_GETFL);
  if (goes_on_signalling && now >= 0) flags |= static_cast<unsigned>(now) & O_ASYNC;
  const auto wanted =
      static_cast<int>((static_cast<unsigned>(now) & ~kSettable) | (flags & kSettable));
  if (now >= 0 && now == wanted) return {};
  // A file that signals tells by the number by which it was set.
  const UniqueFd same(::fcntl(copy.get(), F_DUPFD_CLOEXEC, descriptor));
  const int by = same.get() == descriptor ? same.get() : copy.get();
  if (now >= 0 && ::fcntl(by, F_SETFL, wanted) == 0) return {};
  return fail(errno_error(
      fmt::format("cannot set the flags of descriptor {} of process {}", descriptor, pid.value),
      errno));
}

struct TerminalPairs::Known {
  std::map<TerminalKey, TerminalEnds> terminals;
};

TerminalPairs::TerminalPairs(std::span<const Pid> tree)
    : known_(std::make_unique<Known>(Known{terminals_of(tree)})) {}
TerminalPairs::~TerminalPairs() = default;

Result<void> TerminalPairs::put_unread_back(Pid pid, int descriptor, const std::string& unread,
                                            bool is_written) const {
  const TerminalEnd place{pid, descriptor};
  STASIS_TRY_ASSIGN(const auto end, copy_of(place));
  struct stat status {};
  const auto key =
      ::fstat(end.get(), &status) == 0 ? key_of(place, status) : std::optional<TerminalKey>();
  const auto found = key ? known_->terminals.find(*key) : known_->terminals.end();
  if (found == known_->terminals.end() || !found->second.master || !found->second.slave)
    return fail(ErrorCode::kIo,
                fmt::format("the terminal of descriptor {} of process {} has no other end",
                            descriptor, pid.value),
                {});
  const bool of_slave = is_slave(status);
  STASIS_TRY_ASSIGN(const auto other,
                    copy_of(of_slave ? *found->second.master : *found->second.slave));
  const NotWaiting end_waits_not(end);
  const NotWaiting other_waits_not(other);
  std::string what = of_slave ? unread : without_status(end, unread);
  PlainTerminal terminal(end);
  std::string line = terminal.take_all();
  if (is_written) line.resize(line.size() - std::min(line.size(), what.size()));
  const bool has_lines = terminal.has_lines();
  const std::size_t readable = what.size();
  if (has_lines && !what.empty() && !what.ends_with('\n')) what += PlainTerminal::kEnd;
  if (has_lines) what += line;
  const bool done = terminal.become_plain() &&
                    (takes_output(other) ? write_to(other, what) : type_into(end, what));
  const int why = errno;
  if (done) wait_for_unread(end, readable);
  if (done) return {};
  return fail(errno_error(fmt::format("cannot write {} bytes to the terminal of descriptor {} of "
                                      "process {} again",
                                      what.size(), descriptor, pid.value),
                          why));
}

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
