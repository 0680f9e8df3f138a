#include "direct/sharing.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "abi/agent_protocol.h"
#include "base/fd.h"

namespace stasis {
namespace {

using direct::Share;
using direct::ShareId;
using direct::ShareRole;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1 << 20;
// The processes have numbers that the kernel gives to none: they are looked at.

Share owned(std::uint64_t service, std::uint64_t number, std::uint32_t open = 0) {
  return {ShareId{service, number}, 2 * kMiB, ShareRole::kOwner, open};
}
Share imported(std::uint64_t service, std::uint64_t number) {
  return {ShareId{service, number}, 2 * kMiB, ShareRole::kImporter, 0};
}
// As whole processes, by descriptors.
Share lends(std::uint64_t service, std::uint32_t to) {
  return {ShareId{service, 0}, 0, ShareRole::kLender, to};
}
Share holds(std::uint64_t service) { return {ShareId{service, 0}, 0, ShareRole::kHolder, 0}; }
const Share kForeign{ShareId{}, kMiB, ShareRole::kForeign, 0};

ErrorCode refused(const std::vector<ProcessShares>& processes, const std::string& because) {
  const auto checked = check_sharing(processes);
  if (checked) return ErrorCode{};
  EXPECT_THAT(checked.error().message, HasSubstr(because));
  EXPECT_FALSE(checked.error().remedy.empty());
  return checked.error().code;
}

TEST(Sharing, ThoseWhoHaveEachOthersMemoryGoTogether) {
  const ProcessShares first{Pid{5000010}, 1000, {owned(1, 1), imported(2, 1), imported(2, 2)}};
  const ProcessShares second{Pid{5000011}, 1000, {owned(2, 1), owned(2, 2), imported(1, 1)}};
  const ProcessShares third{Pid{5000012}, 1000, {imported(1, 1), imported(2, 2)}};
  EXPECT_TRUE(check_sharing({first, second, third}));
  EXPECT_TRUE(check_sharing({}));
  EXPECT_TRUE(any_imports({first}));
  EXPECT_FALSE(any_imports({{Pid{5000010}, 1000, {owned(1, 1)}}}));
}

TEST(Sharing, WhatAProcessHasImportedIsOfOneAmongThem) {
  const ProcessShares importer{
      Pid{5000010}, 1000, {imported(2, 1), imported(2, 2), imported(1, 1)}};
  const ProcessShares owner{Pid{5000011}, 1000, {owned(2, 1)}};
  EXPECT_EQ(refused({importer, owner}, "process 5000010 has imported 2 pieces (4.00 MiB)"),
            ErrorCode::kNotSupported);
  EXPECT_EQ(refused({importer, owner}, "whose owner no agent finds"), ErrorCode::kNotSupported);
  // Nothing would help but another way to share it.
  EXPECT_EQ(refused({{Pid{5000012}, 0, {kForeign}}}, "process 5000012 has 1 piece (1.00 MiB)"),
            ErrorCode::kNotSupported);
}

TEST(Sharing, WhatHasNoOwnerAnyMoreIsInheritedByOne) {
  const auto orphan = [](std::uint64_t service, std::uint64_t number, bool lost_owner = true) {
    Share share = imported(service, number);
    share.open = lost_owner ? direct::kOwnerLost : 0;
    return share;
  };
  const std::vector<ProcessShares> two = {{Pid{5000010}, 1000, {orphan(2, 1), owned(1, 1)}},
                                          {Pid{5000011}, 1000, {orphan(2, 1), orphan(2, 2)}}};
  const Owners owners = {{ShareId{1, 1}, 0}};
  EXPECT_EQ(find_heirs(two, owners), (Heirs{{ShareId{2, 1}, 0}, {ShareId{2, 2}, 1}}));
  EXPECT_TRUE(check_sharing(two));
  EXPECT_FALSE(may_settle(two));
  // Only one that still has it can.
  Share given_up = imported(2, 1);
  given_up.open = direct::kGivenUp;
  EXPECT_EQ(find_heirs({{Pid{5000010}, 0, {given_up}}, {Pid{5000011}, 0, {orphan(2, 1)}}}, owners),
            (Heirs{{ShareId{2, 1}, 1}}));
  EXPECT_EQ(find_heirs({{Pid{5000010}, 0, {given_up}}}, owners), Heirs());
  // Its owner may live.
  EXPECT_EQ(
      refused({{Pid{5000010}, 1000, {orphan(2, 1)}}, {Pid{5000011}, 1000, {orphan(2, 1, false)}}},
              "process 5000010 has imported 1 piece"),
      ErrorCode::kNotSupported);
  // Of two users, of whom one may have forged it.
  EXPECT_EQ(refused({{Pid{5000010}, 1000, {orphan(2, 1)}}, {Pid{5000011}, 0, {orphan(2, 1)}}},
                    "process 5000010"),
            ErrorCode::kNotSupported);
}

// To look through all processes for each takes minutes.
TEST(Sharing, TheOwnerOfManyPiecesIsLookedForOnce) {
  constexpr std::uint64_t kPieces = 20000;
  constexpr std::uint64_t kService = 0x7465737400000001;
  const UniqueFd asked(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string text = fmt::format("{}{:016x}", direct::kShareSocket, kService);
  text.copy(name.sun_path + 1, sizeof name.sun_path - 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  ASSERT_EQ(::bind(asked.get(), reinterpret_cast<const sockaddr*>(&name), size), 0);
  ASSERT_EQ(::listen(asked.get(), 1), 0);
  // This process made them, and has freed them.
  ProcessShares process{Pid{::getpid()}, ::getuid(), {}};
  for (std::uint64_t i = 1; i <= kPieces; ++i)
    process.shares.push_back(imported(kService, i));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(find_heirs({process}, {}).size(), kPieces);
  EXPECT_TRUE(check_sharing({process}));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Sharing, MemoryOfAnotherUserIsNotLent) {
  const ProcessShares importer{Pid{5000010}, 0, {imported(2, 1)}};
  EXPECT_EQ(refused({importer, {Pid{5000011}, 1000, {owned(2, 1)}}},
                    "process 5000010 (user 0) has imported some of process 5000011 (user 1000)"),
            ErrorCode::kNotSupported);
  // An id stands in /proc/net/unix, so a user could claim what root has made.
  EXPECT_EQ(refused({{Pid{5000010}, 1000, {imported(2, 1)}}, {Pid{5000011}, 0, {owned(2, 1)}}},
                    "process 5000010"),
            ErrorCode::kNotSupported);
}

TEST(Sharing, TwoThatClaimTheSamePieceAreNotBelieved) {
  EXPECT_EQ(refused({{Pid{5000010}, 0, {owned(1, 1)}}, {Pid{5000011}, 0, {owned(1, 1)}}},
                    "5000010 and 5000011"),
            ErrorCode::kInternal);
}

TEST(Sharing, WhatIsOnItsWayMaySettle) {
  const ProcessShares importer{Pid{5000011}, 0, {imported(1, 1)}};
  EXPECT_FALSE(may_settle({}));
  EXPECT_FALSE(may_settle({{Pid{5000010}, 0, {owned(1, 1, 1)}}, importer}));
  EXPECT_TRUE(may_settle({{Pid{5000010}, 0, {owned(1, 1, 2)}}, importer}));
  EXPECT_TRUE(may_settle({{Pid{5000010}, 0, {owned(1, 2)}}, importer}));
  // What is forged does not get better.
  EXPECT_FALSE(
      may_settle({{Pid{5000010}, 0, {owned(2, 1)}}, {Pid{5000012}, 0, {owned(2, 1)}}, importer}));
}

TEST(Sharing, WhatIsOpenElsewhereByIpcIsToldByTheOwner) {
  const ProcessShares importer{Pid{5000011}, 0, {imported(1, 1)}};
  EXPECT_TRUE(check_sharing({{Pid{5000010}, 0, {owned(1, 1, 1)}}, importer}));
  EXPECT_EQ(refused({{Pid{5000010}, 0, {owned(1, 1, 2)}}, importer}, "process 5000010 has made it"),
            ErrorCode::kNotSupported);
}

TEST(Sharing, WhatIsImportedElsewhereByDescriptorIsToldByTheOwner) {
  const ProcessShares owner{Pid{5000010}, 0, {owned(1, 1), owned(1, 2), lends(1, 2)}};
  const ProcessShares first{Pid{5000011}, 0, {imported(1, 1), imported(1, 2), holds(1)}};
  const ProcessShares second{Pid{5000012}, 0, {imported(1, 2), holds(1)}};
  EXPECT_TRUE(check_sharing({owner, first, second}));
  EXPECT_EQ(refused({owner, first}, "process 5000010 has made it"), ErrorCode::kNotSupported);
  EXPECT_TRUE(may_settle({owner, first}));
  EXPECT_FALSE(may_settle({owner, first, second}));
  // It gave all of it up, and its connection is about to end.
  EXPECT_TRUE(check_sharing({owner, first, {Pid{5000012}, 0, {holds(1)}}}));
  EXPECT_FALSE(any_imports({owner, {Pid{5000012}, 0, {holds(1)}}}));
}

TEST(Sharing, WhatAnotherUsersProcessSaysHidesNoOther) {
  for (const Share& forged : {holds(1), imported(1, 1)}) {
    const ProcessShares owner{Pid{5000010}, 1000, {owned(1, 1, 1), lends(1, 1)}};
    const std::vector<Share> real = {holds(1), imported(1, 1)};
    EXPECT_TRUE(check_sharing({owner, {Pid{5000011}, 1000, real}}));
    EXPECT_FALSE(check_sharing({owner, {Pid{5000011}, 1001, {forged}}}));
    EXPECT_TRUE(may_settle({owner, {Pid{5000011}, 1001, {forged}}}));
  }
  EXPECT_EQ(refused({{Pid{5000010}, 1000, {lends(1, 1)}}, {Pid{5000011}, 1001, {holds(1)}}},
                    "process 5000010 has made it"),
            ErrorCode::kNotSupported);
  EXPECT_TRUE(check_sharing({{Pid{5000010}, 1000, {lends(1, 1)}}, {Pid{5000011}, 0, {holds(1)}}}));
}

TEST(Sharing, WhatADeviceOrAnotherHostHasIsRefused) {
  const Share outside{ShareId{}, 2 * kMiB, ShareRole::kOutside, 0};
  EXPECT_EQ(refused({{Pid{5000010}, 0, {owned(1, 1), outside, outside}}},
                    "process 5000010 has given out 2"),
            ErrorCode::kNotSupported);
  EXPECT_FALSE(any_imports({{Pid{5000010}, 0, {outside}}}));
}

}  // namespace
}  // namespace stasis
