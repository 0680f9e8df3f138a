// Timers that CRIU restores as others than they were.
#include <fcntl.h>

#include <ctime>
#include <sstream>

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

}  // namespace

void probe_timers(const Processes& processes, Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    if (const int count = timers_of_the_day(info.pid); count > 0)
      out.add(info.pid, kOfTheDay, fmt::format("{} of them", count));
  }
}

}  // namespace stasis::doctor
