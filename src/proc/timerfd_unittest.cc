#include "proc/timerfd.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

using std::chrono::nanoseconds;

TEST(TimerFd, OneThatExpiresAgainWhileItIsReadIsReadAsOfOneMoment) {
  constexpr nanoseconds kInterval(4'000);  // shorter than /proc takes to be read
  const UniqueFd file(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  ASSERT_TRUE(file.valid());
  const nanoseconds first = clock_now(CLOCK_MONOTONIC) + std::chrono::milliseconds(1);
  ASSERT_TRUE(arm_at(file, TFD_TIMER_ABSTIME, first, kInterval));
  ::usleep(5'000);
  for (int i = 0; i < 50; ++i) {
    const auto timers = timer_fds(Pid{::getpid()});
    const auto ours = std::ranges::find(timers, file.get(), &TimerFd::descriptor);
    ASSERT_NE(ours, timers.end());
    TimerFd timer = *ours;
    read_exactly(Pid{::getpid()}, timer);
    EXPECT_EQ(timer.interval.count(), kInterval.count());
    EXPECT_GT(timer.left.count(), 0);
    EXPECT_LE(timer.left.count(), kInterval.count());
    // Of the next expiration both tell the same: by the clock, and by those that were counted.
    const nanoseconds next = first + kInterval * static_cast<std::int64_t>(timer.ticks);
    EXPECT_LT(std::chrono::abs(timer.read_at + timer.left - next).count(), 200'000)
        << timer.ticks << " expirations";
  }
}

}  // namespace
}  // namespace stasis::proc
