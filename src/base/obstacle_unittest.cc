#include "base/obstacle.h"

#include <set>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace stasis
