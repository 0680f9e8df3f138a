#include "sim/faults.h"

#include <gtest/gtest.h>

namespace stasis::sim {
namespace {

std::vector<Fault> parsed(std::string_view text) {
  std::vector<Fault> faults;
  std::string error;
  EXPECT_TRUE(parse_faults(text, faults, error)) << error;
  return faults;
}

TEST(Faults, AreReadWithCountAndProcess) {
  const auto faults = parsed("checkpoint:error=999@2 pid=17; lock:delay=500ms\nrestore:oom");
  ASSERT_EQ(faults.size(), 3u);
  EXPECT_EQ(faults[0].action, FaultAction::kCheckpoint);
  EXPECT_EQ(faults[0].value, 999u);
  EXPECT_EQ(faults[0].nth, 2u);
  EXPECT_EQ(faults[0].pid, 17u);
  EXPECT_EQ(faults[1].value, 500'000'000u);
  EXPECT_EQ(faults[2].effect, FaultEffect::kError);
  EXPECT_EQ(faults[2].value, 2u);
}

TEST(Faults, MayBeCommentedAndEmpty) {
  EXPECT_TRUE(parsed("").empty());
  EXPECT_EQ(parsed("# lock:hang; lock:die\n ; lock:timeout # why\n\n").size(), 1u);
}

TEST(Faults, AreRefusedWithAReasonWhenMalformed) {
  for (const char* text : {"lock",
                           "lock:",
                           "lok:timeout",
                           "lock:tmeout",
                           "checkpoint:timeout",
                           "lock:rate=1M",
                           "copy:error=1",
                           "copy:rate=",
                           "lock:error=0",
                           "lock:error=1000",
                           "lock:error=x",
                           "lock:delay=5",
                           "lock:timeout=3",
                           "lock:timeout@0",
                           "lock:timeout@x",
                           "lock:timeout pid=0",
                           "lock:timeout pod=3",
                           "lock:timeout @2",
                           "lock:timeout gpu=1",
                           "transfer:delay=1s gpu=x",
                           "context:failed",
                           "import:rate=1M",
                           "transfer:timeout"}) {
    std::vector<Fault> faults;
    std::string error;
    EXPECT_FALSE(parse_faults(text, faults, error)) << text;
    EXPECT_NE(error.find("fault '"), std::string::npos);
  }
}

TEST(Faults, MayBeOnCallsOfTheProcessItself) {
  const auto faults =
      parsed("context:oom; import:error=801@3; transfer:delay=20ms; transfer:die@9");
  ASSERT_EQ(faults.size(), 4u);
  EXPECT_EQ(plan_for(faults, FaultAction::kContext, 1, 7).error, 2u);
  EXPECT_EQ(plan_for(faults, FaultAction::kImport, 2, 7).error, 0u);
  EXPECT_EQ(plan_for(faults, FaultAction::kImport, 3, 7).error, 801u);
  EXPECT_EQ(plan_for(faults, FaultAction::kTransfer, 8, 7).delay_ns, 20'000'000u);
  EXPECT_TRUE(plan_for(faults, FaultAction::kTransfer, 9, 7).die);
  const auto on_one = parsed("transfer:delay=20ms gpu=1");
  EXPECT_EQ(plan_for(on_one, FaultAction::kTransfer, 1, 7, 0).delay_ns, 0u);
  EXPECT_EQ(plan_for(on_one, FaultAction::kTransfer, 2, 7, 1).delay_ns, 20'000'000u);
  EXPECT_TRUE(is_own_call(FaultAction::kTransfer));
  EXPECT_FALSE(is_own_call(FaultAction::kCopy));
}

TEST(Plan, TakesWhatFitsTheCall) {
  const auto faults = parsed("lock:timeout@1;lock:error=304@2;lock:delay=1s pid=5;copy:rate=1M");
  auto first = plan_for(faults, FaultAction::kLock, 1, 4);
  EXPECT_TRUE(first.timeout);
  EXPECT_EQ(first.error, 0u);
  EXPECT_EQ(first.delay_ns, 0u);
  EXPECT_EQ(first.rate, 0u);
  auto second = plan_for(faults, FaultAction::kLock, 2, 5);
  EXPECT_FALSE(second.timeout);
  EXPECT_EQ(second.error, 304u);
  EXPECT_EQ(second.delay_ns, 1'000'000'000u);
  EXPECT_EQ(plan_for(faults, FaultAction::kRestore, 9, 9).rate, 1u << 20);
}

}  // namespace
}  // namespace stasis::sim
