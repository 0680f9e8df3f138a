// Timers that CRIU restores as others than they were, and signals that it cannot queue again.
#include <fcntl.h>

#include <ctime>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"

namespace stasis::doctor {
namespace {

// proc_pid_timers(5) says by which clock a timer was made, but not whether it was set for a time:
// the kernel does not tell, CRIU's code in the process neither.
constexpr Kind kOfTheDay{
    "posix-timer", Severity::kYellow,
    "has timers by the clock of the day (timer_create with CLOCK_REALTIME), which wait after a "
    "restore for what was left of their time, also if they were set for a time of day",
    "if they were (TIMER_ABSTIME), use timerfd_create(), or let the program set them anew"};

int timers_of_the_day(Pid pid) {
  constexpr std::size_t kMost = 16U << 20;
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/timers", pid.value), kMost);
  if (!text) return 0;
  int count = 0;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    if (line == fmt::format("ClockID: {}", CLOCK_REALTIME) ||
        line == fmt::format("ClockID: {}", CLOCK_REALTIME_ALARM)) {
      ++count;
    }
  }
  return count;
}

constexpr Kind kSignalLimit{
    "signal-limit", Severity::kRed,
    "has signals waiting, and a limit of queued signals (RLIMIT_SIGPENDING) below what its user "
    "has "
    "queued, with which no restore queues them again",
    "raise it (prlimit --pid PID --sigpending=1024), or let the program take its signals first"};

// "5/0": what the user has queued, and the process's limit; empty if that is kept, or none waits.
std::string queue_beyond_limit(Pid pid) {
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid.value));
  if (!text) return {};
  unsigned long long queued = 0;
  unsigned long long limit = 0;
  bool waits = false;
  std::string shown;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    constexpr std::string_view kQueueLine = "SigQ:\t";
    if (line.starts_with(kQueueLine)) {
      shown = line.substr(kQueueLine.size());
      char slash = 0;
      std::istringstream(shown) >> queued >> slash >> limit;
    }
    if (line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"))
      waits |= line.find_first_not_of('0', line.find('\t') + 1) != std::string::npos;
  }
  return waits && queued > limit ? shown : std::string();
}

}  // namespace

void probe_timers(const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    if (const int count = timers_of_the_day(info.pid); count > 0)
      out.add(info.pid, kOfTheDay, fmt::format("{} of them", count));
    if (const auto queue = queue_beyond_limit(info.pid); !queue.empty())
      out.add(info.pid, kSignalLimit, queue);
  }
}

}  // namespace stasis::doctor
