#include "attach/agent_hooks.h"

#include <array>
#include <cstring>

#include <gtest/gtest.h>

namespace stasis::attach {
namespace {

constexpr std::array<std::uint64_t, 3> kEntries{0x7000'0000'1000, 0x7000'0000'1040,
                                                0x7000'0000'2000};

bool at_hook(std::uint64_t instruction, std::vector<std::uint64_t> stack = {}) {
  return is_at_hook(instruction, stack, kEntries);
}

TEST(AgentHooks, AThreadIsInTheWayOnlyWithinTheFirstInstructions) {
  for (const std::uint64_t entry : kEntries) {
    EXPECT_FALSE(at_hook(entry));  // it takes the jump
    EXPECT_TRUE(at_hook(entry + 1));
    EXPECT_TRUE(at_hook(entry + 4));
    EXPECT_FALSE(at_hook(entry + 6));
    EXPECT_FALSE(at_hook(entry + 10));
    EXPECT_FALSE(at_hook(entry - 1));
  }
  EXPECT_FALSE(at_hook(0));
  EXPECT_FALSE(at_hook(~std::uint64_t{0}));
  EXPECT_FALSE(is_at_hook(1, {}, {}));
}

TEST(AgentHooks, AHandlerOfASignalMayBeToGoBackThere) {
  EXPECT_TRUE(at_hook(5, {1, 2, kEntries[1] + 4}));
  EXPECT_FALSE(at_hook(5, {1, kEntries[1], kEntries[1] + 6}));
}

// What an agent says of one entry point, and what lies there.
struct Said {
  EntryPatch patch{kEntries[0], 0, 0};
  std::array<unsigned char, kEntryBytes> begin{};

  Said() {
    std::memcpy(begin.data(), kEntryBegin, sizeof kEntryBegin);
    std::memcpy(&patch.before, kEntryBegin, sizeof patch.before);
    std::array<unsigned char, 8> jump{};
    std::memcpy(jump.data(), kEntryBegin, jump.size());
    jump[0] = 0xe9;
    jump[1] = jump[2] = jump[3] = jump[4] = 0x10;
    std::memcpy(&patch.after, jump.data(), sizeof patch.after);
  }
  bool fits() const { return check_patch(patch, begin).has_value(); }
};

TEST(AgentHooks, AnEntryPointIsComparedByteByByte) {
  EXPECT_TRUE(Said().fits());
  for (std::size_t i = 0; i < kEntryBytes; ++i) {
    Said other;
    other.begin.at(i) ^= 1;
    EXPECT_FALSE(other.fits()) << i;
  }
  // All in agreement, but not as driver 580's.
  Said other;
  other.begin[2] ^= 1;
  other.patch.before ^= 1U << 16;
  other.patch.after ^= 1U << 16;
  EXPECT_FALSE(other.fits());
}

TEST(AgentHooks, WhatAKilledToolHasHookedIsGoneOnWith) {
  Said said;
  std::memcpy(said.begin.data(), &said.patch.after, sizeof said.patch.after);
  EXPECT_TRUE(said.fits());
}

TEST(AgentHooks, OnlyAJumpIsWritten) {
  Said said;
  said.patch.after ^= 1;
  EXPECT_FALSE(said.fits());
  said = {};
  said.patch.after ^= std::uint64_t{1} << 48;  // behind the jump
  EXPECT_FALSE(said.fits());
  said = {};
  said.patch.entry += 4;
  EXPECT_FALSE(said.fits());
}

}  // namespace
}  // namespace stasis::attach
