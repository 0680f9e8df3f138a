#include "proc/timerfd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <sstream>
#include <string>

#include <fmt/format.h>

#include "proc/descriptors.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr const char* kName = "anon_inode:[timerfd]";
// linux/timerfd.h, since Linux 3.17
constexpr unsigned long kSetTicks = _IOW('T', 0, std::uint64_t);

timespec as_timespec(nanoseconds time) {
  const auto whole = std::chrono::duration_cast<seconds>(time);
  return {static_cast<time_t>(whole.count()), static_cast<long>((time - whole).count())};
}

// "(SECONDS, NANOSECONDS)"
std::optional<nanoseconds> parse_pair(const std::string& text) {
  constexpr long long kMost = 1LL << 33;  // seconds: 272 years, which fit in nanoseconds
  if (!text.starts_with('(')) return std::nullopt;
  char* end = nullptr;
  const long long whole = std::strtoll(text.c_str() + 1, &end, 10);
  if (*end != ',') return std::nullopt;
  const long long rest = std::strtoll(end + 1, &end, 10);
  if (*end != ')') return std::nullopt;
  if (whole < 0 || whole > kMost || rest < 0 || rest >= 1'000'000'000) return std::nullopt;
  return seconds(whole) + nanoseconds(rest);
}

// proc_pid_fdinfo(5)
std::optional<TimerFd> read_timer(Pid pid, int descriptor) {
  const auto text =
      read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor), 65536);
  if (!text) return std::nullopt;
  TimerFd timer;
  timer.descriptor = descriptor;
  std::istringstream lines(*text);
  bool known = false;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    line.resize(colon);
    if (line == "clockid") {
      timer.clock = static_cast<int>(std::strtol(value.c_str(), nullptr, 10));
      known = true;
    } else if (line == "ticks") {
      timer.ticks = std::strtoull(value.c_str(), nullptr, 10);
    } else if (line == "settime flags") {
      timer.flags = static_cast<int>(std::strtol(value.c_str(), nullptr, 8));
    } else if (line == "it_value" || line == "it_interval") {
      const auto time = parse_pair(value);
      if (!time) return std::nullopt;
      (line == "it_value" ? timer.left : timer.interval) = *time;
    }
  }
  if (!known) return std::nullopt;
  timer.read_at = clock_now(timer.clock);
  return timer;
}

nanoseconds as_nanoseconds(const timespec& time) {
  return seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

nanoseconds offset_of(const std::string& process, std::string_view clock) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/timens_offsets", process), 4096);
  if (!text) return nanoseconds(0);
  std::istringstream lines(*text);
  std::string name;
  long long whole = 0;
  long long rest = 0;
  while (lines >> name >> whole >> rest) {
    if (name == clock) return seconds(whole) + nanoseconds(rest);
  }
  return nanoseconds(0);
}

Error cannot_set(int number) { return errno_error("cannot set a timerfd", number); }

Result<void> set_ticks_when_expired(const UniqueFd& timer, std::uint64_t ticks) {
  constexpr int kExpiresWithinMs = 1000;  // it expires within microseconds
  pollfd file{timer.get(), POLLIN, 0};
  if (::poll(&file, 1, kExpiresWithinMs) != 1) return fail(cannot_set(ETIME));
  // A read would find one expiration more or less than there were.
  if (::ioctl(timer.get(), kSetTicks, &ticks) != 0) return fail(cannot_set(errno));
  return {};
}

}  // namespace

std::vector<TimerFd> timer_fds(Pid pid) {
  std::vector<TimerFd> timers;
  const auto files = ProcFs().open_files(pid);
  if (!files) return timers;
  for (const OpenFile& file : *files) {
    if (file.path != kName) continue;
    if (auto timer = read_timer(pid, file.descriptor)) timers.push_back(*timer);
  }
  return timers;
}

void read_exactly(Pid pid, TimerFd& timer) {
  constexpr int kMostReads = 8;
  constexpr nanoseconds kOneMoment(20'000);
  const auto process = Pidfd::open(pid);
  if (!process) return;
  const auto copy = borrow_timer_fd(*process, timer.descriptor);
  if (!copy) return;
  nanoseconds shortest = nanoseconds::max();
  for (int i = 0; i < kMostReads && shortest > kOneMoment; ++i) {
    itimerspec now{};
    const nanoseconds before = clock_now(timer.clock);
    if (::timerfd_gettime(copy->get(), &now) != 0) return;
    const nanoseconds duration = clock_now(timer.clock) - before;
    auto counted = read_timer(pid, timer.descriptor);
    if (!counted) return;
    if (duration >= shortest) continue;
    shortest = duration;
    counted->read_at = before + duration / 2;
    const nanoseconds left = as_nanoseconds(now.it_value);
    // One that has expired between the two readings counts for neither. One that had expired again
    // before the first did so just now: intervals may be shorter than the call.
    if (left.count() > 0 && counted->left.count() == 0 && counted->ticks > 0) --counted->ticks;
    counted->left = left.count() == 0 && counted->ticks > 0 ? counted->interval : left;
    timer = *counted;
  }
}

nanoseconds clock_ahead(Pid pid, int clock) {
  std::string_view name;
  if (clock == CLOCK_MONOTONIC) name = "monotonic";
  if (clock == CLOCK_BOOTTIME || clock == CLOCK_BOOTTIME_ALARM) name = "boottime";
  if (name.empty()) return nanoseconds(0);
  return offset_of(std::to_string(pid.value), name) - offset_of("self", name);
}

nanoseconds clock_now(int clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return as_nanoseconds(now);
}

Result<UniqueFd> borrow_timer_fd(const Pidfd& process, int descriptor) {
  UniqueFd copy(static_cast<int>(::syscall(SYS_pidfd_getfd, process.fd(), descriptor, 0)));
  if (!copy.valid())
    return fail(errno_error(fmt::format("cannot reach descriptor {}", descriptor), errno));
  std::array<char, 64> name{};
  const std::string link = fmt::format("/proc/self/fd/{}", copy.get());
  if (::readlink(link.c_str(), name.data(), name.size() - 1) < 0 ||
      std::string_view(name.data()) != kName) {
    drop(std::move(copy));
    return fail(ErrorCode::kInternal, fmt::format("descriptor {} is no timerfd", descriptor), {});
  }
  return copy;
}

Result<void> arm_at(const UniqueFd& timer, int flags, nanoseconds due, nanoseconds interval) {
  const itimerspec when{as_timespec(interval), as_timespec(due)};
  if (::timerfd_settime(timer.get(), flags, &when, nullptr) == 0) return {};
  return fail(cannot_set(errno));
}

Result<void> set_unread(const UniqueFd& timer, std::uint64_t ticks, bool is_past) {
  if (is_past) return set_ticks_when_expired(timer, ticks + 1);
  if (::ioctl(timer.get(), kSetTicks, &ticks) != 0) return fail(cannot_set(errno));
  return {};
}

Result<void> arm_as_expired(const UniqueFd& timer, nanoseconds interval, std::uint64_t ticks) {
  const itimerspec at_once{as_timespec(interval), {0, 1}};
  if (::timerfd_settime(timer.get(), 0, &at_once, nullptr) != 0) return fail(cannot_set(errno));
  return set_ticks_when_expired(timer, ticks);
}

}  // namespace stasis::proc
