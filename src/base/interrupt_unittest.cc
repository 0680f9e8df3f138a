#include "base/interrupt.h"

#include <thread>

#include <gtest/gtest.h>

#include "base/scope_guard.h"

namespace stasis {
namespace {

TEST(Interrupt, TheFirstSignalCounts) {
  Interrupt interrupt;
  EXPECT_TRUE(interrupt.check());
  EXPECT_FALSE(interrupt.requested());
  interrupt.request(15);
  interrupt.request(2);
  EXPECT_EQ(interrupt.signal_number(), 15);
  auto checked = interrupt.check();
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, ErrorCode::kInterrupted);
}

TEST(Interrupt, AfterTheTimeLimitItIsATimeout) {
  Interrupt interrupt;
  interrupt.set_time_limit(std::chrono::hours(1));
  EXPECT_TRUE(interrupt.check());
  interrupt.set_time_limit(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  auto checked = interrupt.check();
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, ErrorCode::kTimeout);
  interrupt.set_time_limit(std::chrono::milliseconds(0));
  EXPECT_TRUE(interrupt.check());
}

TEST(Interrupt, WantOfMemoryIsNoSignal) {
  Interrupt interrupt;
  interrupt.want_of_memory();
  EXPECT_FALSE(interrupt.requested());
  const auto checked = interrupt.check();
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, ErrorCode::kOutOfHostMemory);
  interrupt.go_on_without_memory();
  EXPECT_TRUE(interrupt.check());
}

TEST(ScopeGuard, RunsUnlessDismissed) {
  int runs = 0;
  {
    const ScopeGuard guard([&] { ++runs; });
  }
  EXPECT_EQ(runs, 1);
  {
    ScopeGuard guard([&] { ++runs; });
    guard.dismiss();
  }
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace stasis
