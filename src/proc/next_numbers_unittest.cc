#include "proc/next_numbers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis::proc {
namespace {

using ::testing::Eq;
using ::testing::Optional;

constexpr int kLimit = 32768;

TEST(NextNumbers, StayWhereNoneIsNear) {
  EXPECT_THAT(number_to_go_on_after({}, 100, kLimit), Eq(std::nullopt));
  EXPECT_THAT(number_to_go_on_after({1000, 1001}, 1001, kLimit), Eq(std::nullopt));
  EXPECT_THAT(number_to_go_on_after({20'000}, 1000, kLimit), Eq(std::nullopt));
}

TEST(NextNumbers, PassThoseThatAreNear) {
  EXPECT_THAT(number_to_go_on_after({1000, 1001, 1007}, 900, kLimit), Optional(1007));
}

// A fresh namespace, in which the image has the first numbers.
TEST(NextNumbers, PassTheFirst) {
  EXPECT_THAT(number_to_go_on_after({2, 3}, 1, kLimit), Optional(3));
  EXPECT_THAT(number_to_go_on_after({2, 3}, 3, kLimit), Eq(std::nullopt));
}

// The job began at the highest numbers, and its threads have the lowest: above the highest the
// kernel would come to those.
TEST(NextNumbers, PassThoseOnBothSidesOfTheHighest) {
  EXPECT_THAT(number_to_go_on_after({302, 307, 32'765}, 310, kLimit), Eq(std::nullopt));
  EXPECT_THAT(number_to_go_on_after({302, 307, 32'765}, 305, kLimit), Optional(307));
  EXPECT_THAT(number_to_go_on_after({302, 307, 32'765}, 32'764, kLimit), Optional(307));
  EXPECT_THAT(number_to_go_on_after({302, 307, 32'765}, 32'766, kLimit), Optional(307));
}

TEST(NextNumbers, TakeTheLargestGapOfMany) {
  std::set<int> many;
  for (int number = 300; number < kLimit; number += 1000)
    many.insert(number);
  many.erase(9300);
  EXPECT_THAT(number_to_go_on_after(many, 500, kLimit), Optional(8300));
}

// What has numbers that this machine does not give is refused elsewhere.
TEST(NextNumbers, NeverBeginAboveTheLimit) {
  EXPECT_THAT(number_to_go_on_after({1000, 400'000}, 999, kLimit), Optional(1000));
}

}  // namespace
}  // namespace stasis::proc
