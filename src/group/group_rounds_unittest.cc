#include "group/group_rounds.h"

#include <gtest/gtest.h>

namespace stasis {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

class GroupRoundsTest : public testing::Test {
 protected:
  GroupRoundsTest() { rounds_.begin(now_); }
  // Whether it is due some time after the last look.
  bool after(milliseconds time, std::size_t rest) { return rounds_.is_due(now_ += time, rest); }

  Clock::time_point now_ = Clock::now();
  GroupRounds rounds_;
};

TEST_F(GroupRoundsTest, NoneIsLetGoOnBeforeOneRestsAndNothingHasHappenedForAWhile) {
  EXPECT_FALSE(after(milliseconds(100), 0));
  rounds_.part_quiesced(now_, 0);
  EXPECT_FALSE(after(milliseconds(19), 1));
  EXPECT_TRUE(after(milliseconds(1), 1));
  EXPECT_EQ(rounds_.round(), 1U);
  EXPECT_EQ(rounds_.moment(), microseconds(500));
}

TEST_F(GroupRoundsTest, TheMomentDoublesUntilAnotherComesToRest) {
  EXPECT_TRUE(after(milliseconds(20), 1));
  // The same one, let go on in that round.
  rounds_.part_quiesced(now_, rounds_.round());
  EXPECT_FALSE(after(milliseconds(29), 1));
  EXPECT_TRUE(after(milliseconds(1), 1));
  EXPECT_EQ(rounds_.moment(), microseconds(1000));
  rounds_.part_quiesced(now_, 0);
  EXPECT_TRUE(after(milliseconds(45), 2));
  EXPECT_EQ(rounds_.moment(), microseconds(500));
  EXPECT_EQ(rounds_.round(), 3U);
}

TEST_F(GroupRoundsTest, ALongKernelHasTheSecondHalfOfASliceToEnd) {
  EXPECT_TRUE(after(milliseconds(20), 1));
  EXPECT_FALSE(after(milliseconds(980), 1));
  EXPECT_FALSE(after(milliseconds(999), 1));
  // The next slice is twice as long, and begins as the first did.
  EXPECT_TRUE(after(milliseconds(1), 1));
  EXPECT_TRUE(after(milliseconds(1999), 1));
  EXPECT_FALSE(after(milliseconds(1), 1));
}

}  // namespace
}  // namespace stasis
