#include "group/group_links.h"

#include <gtest/gtest.h>

namespace stasis {
namespace {

GroupLinks established(std::vector<std::string> links) {
  GroupLinks out;
  out.established = std::move(links);
  return out;
}

TEST(GroupLinks, EachHasItsOtherEndInAnotherPart) {
  EXPECT_FALSE(find_unmatched_link({}));
  EXPECT_FALSE(
      find_unmatched_link({{"a", established({"1:1 2:2"})}, {"b", established({"2:2 1:1"})}}));
  EXPECT_FALSE(find_unmatched_link(
      {{"a", established({"1:1 2:2 own"})}, {"b", established({"2:2 1:1 own"})}}));
  const auto alone = find_unmatched_link({{"a", established({"1:1 2:2"})}, {"b", established({})}});
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->part, "a");
  EXPECT_EQ(alone->link, "1:1 2:2");
  // Both ends in one part are none of the group's.
  EXPECT_TRUE(find_unmatched_link({{"a", established({"1:1 2:2", "2:2 1:1"})}}));
}

TEST(GroupLinks, OneThatIsBeingClosedIsAnOtherEnd) {
  GroupLinks closing;
  closing.closing = {"2:2 1:1"};
  EXPECT_FALSE(find_unmatched_link({{"a", established({"1:1 2:2"})}, {"b", closing}}));
  // None is looked for to it: the other end may have gone.
  EXPECT_FALSE(find_unmatched_link({{"b", closing}}));
}

TEST(GroupLinks, WhatMayLeadOutNeedsNoOtherEnd) {
  GroupLinks out = established({"1:1 9:9"});
  EXPECT_TRUE(find_unmatched_link({{"a", out}}));
  out.may_lead_out = true;
  EXPECT_FALSE(find_unmatched_link({{"a", out}}));
}

}  // namespace
}  // namespace stasis
