// Timers of all kinds: they fire when they would have fired, by the clock that they were set by.
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <ctime>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kTimersSubject = "timers";
constexpr long kFar = 100000;  // seconds
// What the test's own steps take.
constexpr double kTolerance = 0.2;
// The clock of a restored program goes on while it is restored, and so may be off by that; on a
// busy machine that is seconds.
constexpr double kRestoreTakes = 60;

double seconds(const timespec& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}
double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return seconds(time);
}
timespec as_time(double value) {
  return {static_cast<time_t>(value), static_cast<long>((value - std::floor(value)) * 1e9)};
}

Problem differs(const char* what, double was, double is, double tolerance) {
  if (std::abs(was - is) <= tolerance) return std::nullopt;
  return std::string(what) + " was " + std::to_string(was) + ", is " + std::to_string(is);
}

bool is_readable(int fd, int timeout_ms) {
  pollfd file{fd, POLLIN, 0};
  return poll(&file, 1, timeout_ms) == 1;
}

std::uint64_t take(int fd) {
  std::uint64_t ticks = 0;
  return read(fd, &ticks, sizeof ticks) == sizeof ticks ? ticks : 0;
}

// A periodic one that has expired and was not read: the kernel counts on only when it is.
void add_periodic(Probe& probe, const char* name, clockid_t clock, int flags) {
  const int fd = timerfd_create(clock, TFD_CLOEXEC | TFD_NONBLOCK);
  probe.add_check(
      kTimersSubject, name,
      [=] {
        itimerspec when{{0, 20'000'000}, {0, 20'000'000}};
        if (flags != 0) when.it_value = as_time(now(clock) + 0.02);
        Problem unset = answer(timerfd_settime(fd, flags, &when, nullptr), "timerfd_settime");
        is_readable(fd, 1000);
        return unset;
      },
      [=]() -> Problem {
        if (take(fd) == 0) return "its expirations were forgotten";
        if (!is_readable(fd, 2000)) return "it never fires again";
        if (take(fd) == 0 || !is_readable(fd, 2000)) return "it fires once more only";
        return std::nullopt;
      });
}

// One set by a time that has expired many times and was not read: the kernel counts all of them
// when it is read, also those of the time for which the program was away, as that clock has it.
void add_unread(Probe& probe, const char* name, clockid_t clock) {
  constexpr double kInterval = 0.001;
  const int fd = timerfd_create(clock, TFD_CLOEXEC | TFD_NONBLOCK);
  auto begin = std::make_shared<double>();
  auto counted = std::make_shared<double>();  // also those that an earlier check has read
  probe.add_check(
      kTimersSubject, name,
      [=] {
        *begin = now(clock);
        const itimerspec when{as_time(kInterval), as_time(*begin + kInterval)};
        return answer(timerfd_settime(fd, TFD_TIMER_ABSTIME, &when, nullptr), "timerfd_settime");
      },
      [=]() -> Problem {
        const double least = (now(clock) - *begin) / kInterval;
        *counted += static_cast<double>(take(fd));
        const double most = (now(clock) - *begin) / kInterval;
        constexpr double kOff = 2;
        return differs("expirations", std::clamp(*counted, least, most), *counted, kOff);
      });
}

// One that expires far in the future.
void add_far(Probe& probe, const char* name, clockid_t clock, int flags) {
  const int fd = timerfd_create(clock, TFD_CLOEXEC | TFD_NONBLOCK);
  // By the clock if that is what the program asked for; else what is left of it.
  const auto due = [=] {
    itimerspec left{};
    timerfd_gettime(fd, &left);
    return seconds(left.it_value) + (flags != 0 ? now(clock) : now(CLOCK_MONOTONIC));
  };
  auto before = std::make_shared<double>();
  probe.add_check(
      kTimersSubject, name,
      [=] {
        itimerspec when{{7, 0}, {kFar, 500'000'000}};
        if (flags != 0) when.it_value = as_time(now(clock) + kFar + 0.5);
        Problem unset = answer(timerfd_settime(fd, flags, &when, nullptr), "timerfd_settime");
        *before = due();
        return unset;
      },
      [=] { return differs("due", *before, due(), flags != 0 ? kTolerance : kRestoreTakes); });
}

void add_interval(Probe& probe, const char* name, __itimer_which which) {
  auto before = std::make_shared<double>();
  const auto left = [=] {
    itimerval timer{};
    getitimer(which, &timer);
    const double clock = which == ITIMER_REAL   ? now(CLOCK_MONOTONIC)
                         : which == ITIMER_PROF ? now(CLOCK_PROCESS_CPUTIME_ID)
                                                : static_cast<double>(0);
    return static_cast<double>(timer.it_value.tv_sec) + clock +
           (timer.it_interval.tv_sec == 9 ? 0 : 1e6);
  };
  probe.add_check(
      kTimersSubject, name,
      [=] {
        itimerval timer{{9, 0}, {kFar, 0}};
        Problem unset = answer(setitimer(which, &timer, nullptr), "setitimer");
        *before = left();
        return unset;
      },
      [=]() -> Problem {
        // Processor time is accounted anew after a restore.
        const double off = std::abs(left() - *before);
        if (off < kRestoreTakes) return std::nullopt;
        return "off by " + std::to_string(off) + " s";
      });
}

void add_posix(Probe& probe, const char* name, clockid_t clock, int flags, bool for_thread) {
  auto timer = std::make_shared<timer_t>();
  auto before = std::make_shared<double>();
  const auto due = [=]() {
    itimerspec left{};
    if (timer_gettime(*timer, &left) != 0) return -1.0;
    return seconds(left.it_value) + (flags != 0 ? now(clock) : now(CLOCK_MONOTONIC));
  };
  probe.add_check(
      kTimersSubject, name,
      [=] {
        sigevent event{};
        event.sigev_notify = for_thread ? SIGEV_THREAD_ID : SIGEV_SIGNAL;
        event.sigev_signo = SIGURG;
        event.sigev_value.sival_int = 77;
        event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
        if (timer_create(clock, &event, timer.get()) != 0) return Problem(because("timer_create"));
        itimerspec when{{7, 0}, {kFar, 500'000'000}};
        if (flags != 0) when.it_value = as_time(now(clock) + kFar + 0.5);
        Problem unset = answer(timer_settime(*timer, flags, &when, nullptr), "timer_settime");
        *before = due();
        return unset;
      },
      [=] {
        const bool of_the_day = flags != 0 && clock == CLOCK_REALTIME;
        return differs("due", *before, due(), of_the_day ? kTolerance : kRestoreTakes);
      });
}

}  // namespace

void add_timers(Probe& probe) {
  add_periodic(probe, "timerfd, periodic, expired while all stands still", CLOCK_MONOTONIC, 0);
  add_periodic(probe, "timerfd, periodic, expired, set by a time of day", CLOCK_REALTIME,
               TFD_TIMER_ABSTIME);
  add_unread(probe, "timerfd, periodic, all expirations since a time of day", CLOCK_REALTIME);
  add_unread(probe, "timerfd, periodic, all expirations since a time of CLOCK_MONOTONIC",
             CLOCK_MONOTONIC);
  add_far(probe, "timerfd, what is left of it", CLOCK_MONOTONIC, 0);
  add_far(probe, "timerfd, at a time of day", CLOCK_REALTIME, TFD_TIMER_ABSTIME);
  add_far(probe, "timerfd, at a time of day, cancelled when the clock is set", CLOCK_REALTIME,
          TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET);
  add_far(probe, "timerfd, at a time since the machine's start", CLOCK_MONOTONIC,
          TFD_TIMER_ABSTIME);
  add_far(probe, "timerfd, at a time of CLOCK_BOOTTIME", CLOCK_BOOTTIME, TFD_TIMER_ABSTIME);
  add_interval(probe, "interval timer ITIMER_REAL (alarm)", ITIMER_REAL);
  add_interval(probe, "interval timer ITIMER_VIRTUAL", ITIMER_VIRTUAL);
  add_interval(probe, "interval timer ITIMER_PROF", ITIMER_PROF);
  add_posix(probe, "POSIX timer, what is left of it", CLOCK_MONOTONIC, 0, false);
  add_posix(probe, "POSIX timer, for one thread", CLOCK_MONOTONIC, 0, true);
  add_posix(probe, "POSIX timer, at a time of day", CLOCK_REALTIME, TIMER_ABSTIME, false);
  add_posix(probe, "POSIX timer, at a time since the machine's start", CLOCK_MONOTONIC,
            TIMER_ABSTIME, false);
  auto before = std::make_shared<double>();
  probe.add_check(
      kTimersSubject, "CLOCK_MONOTONIC never goes back",
      [=] {
        *before = now(CLOCK_MONOTONIC);
        return Problem();
      },
      [=] {
        const double is = now(CLOCK_MONOTONIC);
        return is >= *before ? Problem() : differs("clock", *before, is, 0);
      });
}

}  // namespace stasis::workloads
