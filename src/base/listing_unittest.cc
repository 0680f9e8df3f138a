#include "base/listing.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace stasis {
namespace {

const std::vector<std::string> kItems{"a", "b", "c"};

TEST(Listing, ShowsAllOfAShortList) {
  EXPECT_EQ(listed({}), "");
  EXPECT_EQ(listed(kItems), "a; b; c");
  EXPECT_EQ(listed(kItems, ", ", 3), "a, b, c");
}

TEST(Listing, SaysHowManyItLeavesOut) {
  EXPECT_EQ(listed(kItems, "; ", 2), "a; b; and 1 more");
  EXPECT_EQ(listed(kItems, ", ", 1), "a and 2 more");
}

}  // namespace
}  // namespace stasis
