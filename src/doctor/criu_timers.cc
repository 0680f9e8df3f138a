// Timers that CRIU cannot make again or restores as others than they were, and signals that it
// cannot queue again.
#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <ctime>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

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

// posix_cpu_timer_create() and good_sigevent() of the kernel refuse to make them anew, and CRIU
// makes those that are there.
constexpr Kind kEnded{
    "ended-timer", Severity::kRed,
    "has timers (timer_create) that are about a thread or a process that has ended, which no "
    "restore makes again",
    "have the program delete them (timer_delete) before what they are about ends"};
constexpr Kind kOfProcessOutside{
    "ended-timer", Severity::kRed,
    "has timers (timer_create) by the processor time of a process outside of the tree, which no "
    "restore makes again once that has ended",
    "dump that process too, or have the program delete them (timer_delete)"};
// The kernel does not tell which thread such a timer was made by.
constexpr Kind kOfSomeThread{
    "thread-timer", Severity::kYellow,
    "has timers by the processor time of the thread that has made them (timer_create with "
    "CLOCK_THREAD_CPUTIME_ID), which count that of the first thread after a restore",
    "make them by the clock that pthread_getcpuclockid() names, which is kept"};

// CRIU queues the signal again as one of its own, of which the timer knows nothing.
constexpr Kind kTimerSignal{
    "timer-signal", Severity::kYellow,
    "has signals of timers (timer_create) waiting that it blocks: of a periodic timer two come "
    "after a restore, where one with the count of expirations since (si_overrun) would",
    "have the program take them (sigtimedwait) before the dump"};

constexpr Kind kSignalLimit{
    "signal-limit", Severity::kRed,
    "has signals waiting or timers (timer_create), and a limit of queued signals "
    "(RLIMIT_SIGPENDING) below what its user has queued, each timer counting as one, with which no "
    "restore makes them again",
    "raise it (prlimit --pid PID --sigpending=1024), or let the program take its signals and "
    "delete its timers first"};

// As proc_pid_timers(5) has it.
struct PosixTimer {
  int id = 0;
  int clock = 0;
  int signal = 0;
  int thread = 0;  // that it signals; 0: its process, or none
};

int number_in(std::string_view text) {
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::vector<PosixTimer> posix_timers(Pid pid) {
  constexpr std::size_t kMost = 16U << 20;
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/timers", pid.value), kMost);
  std::vector<PosixTimer> out;
  if (!text) return out;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string_view value = std::string_view(line).substr(colon + 2);
    const std::string_view key = std::string_view(line).substr(0, colon);
    if (key == "ID") out.emplace_back().id = number_in(value);
    if (out.empty()) continue;
    if (key == "signal") out.back().signal = number_in(value);
    if (key == "ClockID") out.back().clock = number_in(value);
    // "signal/tid.12"
    constexpr std::string_view kToThread = "/tid.";
    const std::size_t thread = value.find(kToThread);
    if (key == "notify" && value.starts_with("none")) out.back().signal = 0;
    if (key == "notify" && thread != std::string_view::npos)
      out.back().thread = number_in(value.substr(thread + kToThread.size()));
  }
  return out;
}

// What the number of a clock by processor time says (CPUCLOCK_PID() of linux/posix-timers.h).
struct ProcessorClock {
  int number = 0;  // in the PID namespace of the timer's process; 0: of what has made the timer
  bool of_thread = false;
};
std::optional<ProcessorClock> processor_clock(int clock) {
  if (clock >= 0) return std::nullopt;
  constexpr int kPerThread = 4;
  return ProcessorClock{~(clock >> 3), (clock & kPerThread) != 0};
}

// In its own PID namespace.
int own_number(Facts& facts, Pid pid, int number) {
  if (facts.has_our_namespace(pid, "pid")) return number;
  const auto details = facts.procfs().details(Pid{number});
  return details ? details->ns_pid : 0;
}

void probe_timer(Facts& facts, Pid pid, const PosixTimer& timer, const Processes& all, Signs& out) {
  const std::vector<Tid> threads = facts.threads(pid);
  if (threads.empty()) return;  // it has ended
  const auto is_thread = [&](int number, bool as_it_sees) {
    return std::any_of(threads.begin(), threads.end(), [&](Tid thread) {
      return number == (as_it_sees ? own_number(facts, pid, thread.value) : thread.value);
    });
  };
  if (timer.thread != 0 && !is_thread(timer.thread, false))
    out.add(pid, kEnded, fmt::format("timer {} signals thread {}", timer.id, timer.thread));
  const auto clock = processor_clock(timer.clock);
  if (!clock) return;
  if (clock->number == 0) {
    if (clock->of_thread && threads.size() > 1)
      out.add(pid, kOfSomeThread, fmt::format("timer {}", timer.id));
    return;
  }
  if (clock->of_thread) {
    if (!is_thread(clock->number, true))
      out.add(pid, kEnded, fmt::format("timer {} is by thread {}", timer.id, clock->number));
    return;
  }
  const bool is_ours = std::any_of(all.begin(), all.end(), [&](const proc::ProcessInfo& one) {
    return own_number(facts, one.pid, one.pid.value) == clock->number;
  });
  if (is_ours) return;
  const bool is_there =
      facts.has_our_namespace(pid, "pid") && facts.procfs().process(Pid{clock->number}).has_value();
  out.add(pid, is_there ? kOfProcessOutside : kEnded,
          fmt::format("timer {} is by process {}", timer.id, clock->number));
}

// The signals that wait for the process or one of its threads, and are blocked there: a bit each.
std::uint64_t held_signals(Facts& facts, Pid pid) {
  std::uint64_t held = 0;
  for (const Tid thread : facts.threads(pid)) {
    if (const auto status = facts.procfs().thread_status(pid, thread))
      held |= status->pending & status->blocked;
  }
  return held;
}

void probe_timer_signals(Facts& facts, Pid pid, const std::vector<PosixTimer>& timers, Signs& out) {
  if (timers.empty()) return;
  const std::uint64_t held = held_signals(facts, pid);
  constexpr int kSignals = 64;
  for (const PosixTimer& timer : timers) {
    if (timer.signal < 1 || timer.signal > kSignals || (held >> (timer.signal - 1) & 1) == 0)
      continue;
    out.add(pid, kTimerSignal, fmt::format("timer {}, signal {}", timer.id, timer.signal));
  }
}

// "5/0": what the user has queued, and the process's limit; empty if that is kept, or there is
// nothing to queue.
std::string queue_beyond_limit(Pid pid, std::size_t timers) {
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
  // Its user may be another one by now than when they were made.
  if (timers > limit) return fmt::format("{} timers, {}", timers, shown);
  return (waits || timers > 0) && queued > limit ? shown : std::string();
}

}  // namespace

void probe_timers(Facts& facts, const Processes& processes, const Processes& all_processes,
                  Signs& out) {
  for (const proc::ProcessInfo& info : processes) {
    const std::vector<PosixTimer> timers = posix_timers(info.pid);
    const auto of_the_day =
        std::count_if(timers.begin(), timers.end(), [](const PosixTimer& timer) {
          return timer.clock == CLOCK_REALTIME || timer.clock == CLOCK_REALTIME_ALARM;
        });
    if (of_the_day > 0) out.add(info.pid, kOfTheDay, fmt::format("{} of them", of_the_day));
    for (const PosixTimer& timer : timers) {
      if (facts.is_over()) return;
      if (timer.thread != 0 || timer.clock < 0)
        probe_timer(facts, info.pid, timer, all_processes, out);
    }
    probe_timer_signals(facts, info.pid, timers, out);
    if (const auto queue = queue_beyond_limit(info.pid, timers.size()); !queue.empty())
      out.add(info.pid, kSignalLimit, queue);
  }
}

}  // namespace stasis::doctor
