#include "base/obstacle.h"

#include <set>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"

namespace stasis {
namespace {

TEST(ObstacleId, EachIsInTheListOnceAndExplained) {
  std::set<std::string_view> seen;
  for (const ObstacleInfo& info : kObstacles) {
    EXPECT_FALSE(info.id.empty());
    EXPECT_EQ(info.id.find_first_not_of("abcdefghijklmnopqrstuvwxyz-"), std::string_view::npos)
        << info.id;
    EXPECT_TRUE(seen.insert(info.id).second) << info.id << " is there twice";
    EXPECT_FALSE(info.meaning.empty()) << info.id;
    EXPECT_FALSE(info.meaning.ends_with('.')) << info.id;
  }
}

// One that is written out and not in the list does not compile.
TEST(ObstacleId, OfAnotherProcessIsLookedUp) {
  EXPECT_EQ(ObstacleId::find("nccl"), ObstacleId("nccl"));
  EXPECT_EQ(ObstacleId::find("nccl")->name(), "nccl");
  EXPECT_FALSE(ObstacleId::find("nccl-of-tomorrow"));
  EXPECT_FALSE(ObstacleId::find(""));
}

TEST(Obstacle, TheWorstCounts) {
  std::vector<Obstacle> obstacles;
  EXPECT_EQ(worst(obstacles), Severity::kGreen);
  obstacles.push_back({"disk", Severity::kRed, {}, "x"});
  obstacles.push_back({"clock", Severity::kYellow, {}, "x"});
  EXPECT_EQ(worst(obstacles), Severity::kRed);
}

TEST(Obstacle, ArefusalNamesTheOptionOnce) {
  const Error plain = refusal({"nccl", Severity::kRed, Pid{7}, "what", "remedy"});
  EXPECT_EQ(plain.code, ErrorCode::kNotSupported);
  EXPECT_EQ(plain.message, "what");
  EXPECT_EQ(plain.remedy, "remedy");
  ASSERT_EQ(plain.obstacles.size(), 1U);
  EXPECT_EQ(plain.obstacles.front().id, ObstacleId("nccl"));
  EXPECT_EQ(plain.obstacles.front().pid, Pid{7});
  EXPECT_EQ(refusal({"nccl", Severity::kRed, {}, "x", "y", Override::kIgnoreObstacles}).remedy,
            "y; if you know better: --ignore-obstacles");
  const Error named = refusal(
      {"landlock", Severity::kRed, {}, "x", "y: --ignore-obstacles", Override::kIgnoreUndumpable},
      ErrorCode::kUndumpable);
  EXPECT_EQ(named.remedy, "y: --ignore-obstacles");
  EXPECT_EQ(named.code, ErrorCode::kUndumpable);
}

}  // namespace
}  // namespace stasis
