// A piece leaves its place, or other memory takes that, only where this goes unnoticed by all who
// have the piece.
#include "reach.h"

#include <gtest/gtest.h>

namespace stasis::preload {
namespace {

constexpr ShareKey kOwners{7, 1};

bool is_lending() { return true; }
bool is_not_lending() { return false; }
bool is_not_asked() {
  ADD_FAILURE() << "it takes the lock of the tables";
  return true;
}

TEST(Reach, WhatThisProcessAloneHasLeavesAndIsRenewed) {
  Reach reach;
  EXPECT_FALSE(reach.others_may_have());
  EXPECT_FALSE(reach.is_known_elsewhere());
  EXPECT_TRUE(reach.can_be_renewed(is_not_asked));
  reach.enter_trial(true);
  EXPECT_TRUE(reach.can_leave()) << "other memory takes its place";
}

TEST(Reach, WhatOthersHaveOpenLeavesUnlessTheDriverRefusesIt) {
  Reach reach;
  reach.enter_share(1);
  EXPECT_TRUE(reach.is_known_elsewhere());
  EXPECT_FALSE(reach.others_may_have()) << "known, and not open yet";
  reach.count_open(+1);
  EXPECT_TRUE(reach.others_have());
  EXPECT_TRUE(reach.can_leave());
  EXPECT_FALSE(reach.can_be_renewed(is_not_asked));
  reach.enter_trial(true);
  EXPECT_FALSE(reach.can_leave());
  reach.forget_trial();
  EXPECT_TRUE(reach.can_leave());
  reach.enter_trial(true);
  reach.count_open(-1);
  EXPECT_TRUE(reach.can_leave()) << "the other has closed it";
  EXPECT_TRUE(reach.can_be_renewed(is_not_asked));
}

TEST(Reach, WhatWasGivenOutByDescriptorIsRenewedWhileNoProcessHasAnySuchPiece) {
  Reach reach;
  reach.give_out();
  EXPECT_FALSE(reach.others_have());
  EXPECT_TRUE(reach.others_may_have());
  EXPECT_TRUE(reach.can_be_renewed(is_not_lending));
  EXPECT_FALSE(reach.can_be_renewed(is_lending));
  EXPECT_TRUE(reach.can_leave());
  reach.enter_trial(true);
  EXPECT_FALSE(reach.can_leave());
}

TEST(Reach, WithoutATrialWhatWasInheritedCountsAsRefused) {
  Reach own, inherited;
  inherited.enter_key(kOwners);
  EXPECT_TRUE(inherited.others_have());
  EXPECT_TRUE(inherited.is_known_elsewhere());
  EXPECT_FALSE(inherited.can_be_renewed(is_not_asked));
  EXPECT_TRUE(inherited.can_leave());
  for (auto* reach : {&own, &inherited})
    reach->skip_trial();
  EXPECT_FALSE(own.is_refused());
  EXPECT_TRUE(own.can_leave());
  EXPECT_TRUE(inherited.is_refused());
  EXPECT_FALSE(inherited.can_leave());
}

TEST(Reach, WhatADeviceHasStaysUntilThatHasItNoMore) {
  Reach reach;
  reach.set_outside(true);
  EXPECT_FALSE(reach.can_leave());
  reach.set_outside(false);
  EXPECT_TRUE(reach.can_leave());
}

TEST(Reach, WhatWasGivenOutPastTheAgentStaysForEver) {
  Reach reach;
  reach.stay();
  reach.set_outside(true);
  reach.set_outside(false);
  reach.forget_trial();
  EXPECT_FALSE(reach.can_leave());
}

}  // namespace
}  // namespace stasis::preload
