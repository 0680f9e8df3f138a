#include "criu/criu_external.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(CriuExternal, ANamedMountIsTurnedRound) {
  EXPECT_THAT(externals_for_restore({"mnt[/data]:key"}, {}), ElementsAre("mnt[key]:/data"));
}

TEST(CriuExternal, EverythingElseStays) {
  EXPECT_THAT(externals_for_restore({}, {}), IsEmpty());
  EXPECT_THAT(
      externals_for_restore({"mnt[]", "mnt[]:m", "net[123]:x", "mnt[/data]", "mnt[/a]:"}, {}),
      ElementsAre("mnt[]", "mnt[]:m", "net[123]:x", "mnt[/data]", "mnt[/a]:"));
}

TEST(CriuExternal, WhatIsGivenTakesThePlaceOfTheSameName) {
  EXPECT_THAT(externals_for_restore({"mnt[/data]:key", "mnt[/b]:other"}, {"mnt[key]:/elsewhere"}),
              ElementsAre("mnt[other]:/b", "mnt[key]:/elsewhere"));
  EXPECT_THAT(externals_for_restore({"mnt[]:m"}, {"mnt[]:s", "net[ns]:/proc/1/ns/net"}),
              ElementsAre("mnt[]:s", "net[ns]:/proc/1/ns/net"));
}

}  // namespace
}  // namespace stasis
