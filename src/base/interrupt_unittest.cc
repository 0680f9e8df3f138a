#include "base/interrupt.h"

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
