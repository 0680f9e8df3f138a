// The timerfds of another process: read from /proc, set through a copy of the descriptor.
//
// Stateless; thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

struct TimerFd {
  int descriptor = -1;
  int clock = 0;
  int flags = 0;                         // of the last timerfd_settime()
  std::uint64_t ticks = 0;               // expirations that were not read
  std::chrono::nanoseconds left{0};      // 0: expired or disarmed
  std::chrono::nanoseconds interval{0};  // 0: once
  // When all this was so, by our own `clock`.
  std::chrono::nanoseconds read_at{0};
};

// Those of a process; what cannot be read is left out.
std::vector<TimerFd> timer_fds(Pid pid);

// Reads it anew so that `ticks`, `left` and `read_at` are of one moment, however busy the machine
// is and however soon it expires again. A periodic one that has expired and was not read runs on by
// that, as the kernel counts how often it has expired since. `timer` stays where that fails.
void read_exactly(Pid pid, TimerFd& timer);

// By how much a clock of the process's time namespace is ahead of ours. 0 for those of the day.
std::chrono::nanoseconds clock_ahead(Pid pid, int clock);
// That clock as we see it.
std::chrono::nanoseconds clock_now(int clock);

// Copies of a process's timerfd. kNotPermitted; kInternal if the descriptor is something else.
Result<UniqueFd> borrow_timer_fd(const Pidfd& process, int descriptor);

// Arms it so that it expires at `due`, by our own clock.
Result<void> arm_at(const UniqueFd& timer, int flags, std::chrono::nanoseconds due,
                    std::chrono::nanoseconds interval);
// To be read of it, as expirations of before: of one just armed, for a time that is past or not.
Result<void> set_unread(const UniqueFd& timer, std::uint64_t ticks, bool is_past);
// Brings one back that has expired `ticks` times and was not read since: when it is read, the
// kernel arms it again. It has to be let expire for that.
Result<void> arm_as_expired(const UniqueFd& timer, std::chrono::nanoseconds interval,
                            std::uint64_t ticks);

}  // namespace stasis::proc
