// What PoolArena gives out never overlaps what is in use, or what another stream has yet to come
// past; and all of it comes back.
#include "pool_arena.h"

#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace stasis::preload {
namespace {

using cuda::CUdeviceptr;

constexpr CUdeviceptr kBase = CUdeviceptr{1} << 40;
constexpr std::size_t kMiB = std::size_t{1} << 20;

// As the agent does: the units that are missing become present.
CUdeviceptr allocate(PoolArena& arena, std::size_t bytes, StreamId stream) {
  auto fit = arena.find(bytes, stream, false);
  if (!fit) fit = arena.find(bytes, stream, true);
  if (!fit) return 0;
  for (const auto unit : fit->missing)
    arena.set_present(unit, true);
  arena.take(fit->address, bytes);
  return fit->address;
}

TEST(PoolArena, GrowsByUnitsAndLaysAllocationsSideBySide) {
  PoolArena arena(kBase, 8);
  EXPECT_TRUE(arena.empty());
  EXPECT_EQ(allocate(arena, 40 * kMiB, 1), kBase);
  EXPECT_EQ(arena.reserved(), 64 * kMiB);
  // Five units for both, as the driver takes (580.159.04).
  EXPECT_EQ(allocate(arena, 100 * kMiB, 1), kBase + 40 * kMiB);
  EXPECT_EQ(arena.reserved(), 160 * kMiB);
  EXPECT_EQ(arena.used(), 140 * kMiB);
  EXPECT_EQ(allocate(arena, 1, 1), kBase + 140 * kMiB);
  EXPECT_EQ(allocate(arena, 1, 1), kBase + 140 * kMiB + 512);
  EXPECT_EQ(arena.used(), 140 * kMiB + 2);
  EXPECT_EQ(allocate(arena, 200 * kMiB, 1), CUdeviceptr{0}) << "more than there are addresses";
}

TEST(PoolArena, KnowsWhatIsInUse) {
  PoolArena arena(kBase, 8);
  allocate(arena, kMiB, 1);
  const auto second = allocate(arena, 1000, 1);
  EXPECT_EQ(arena.block_at(second)->address, second);
  EXPECT_EQ(arena.block_at(second + 999)->asked, 1000U);
  EXPECT_FALSE(arena.block_at(second + 1000)) << "behind what was asked for";
  EXPECT_FALSE(arena.block_at(kBase + 8 * PoolArena::kUnit));
  EXPECT_FALSE(arena.give(second + 1, 1, 1));
  EXPECT_TRUE(arena.give(second, 1, 1));
  EXPECT_FALSE(arena.give(second, 1, 2)) << "twice";
  EXPECT_FALSE(arena.block_at(second));
}

TEST(PoolArena, WhatAStreamHasFreedItHasAtOnceAndOthersLater) {
  PoolArena arena(kBase, 8);
  const auto first = allocate(arena, 40 * kMiB, 1);
  arena.give(first, 1, 1);
  EXPECT_FALSE(arena.find(40 * kMiB, 2, false));
  EXPECT_EQ(arena.find(40 * kMiB, 1, false)->address, first);
  arena.passed(1, 1);
  EXPECT_EQ(arena.find(40 * kMiB, 2, false)->address, first);
  EXPECT_TRUE(arena.empty());
}

TEST(PoolArena, AStreamThatHasPassedOneFreeHasNotPassedTheNext) {
  PoolArena arena(kBase, 8);
  const auto first = allocate(arena, 10 * kMiB, 1);
  const auto between = allocate(arena, kMiB, 1);
  const auto second = allocate(arena, 10 * kMiB, 1);
  arena.give(first, 1, 1);
  arena.give(second, 1, 2);
  arena.passed(1, 1);
  EXPECT_EQ(arena.find(10 * kMiB, 2, false)->address, first);
  // Side by side they are one piece, which is free when the later one is.
  arena.give(between, 1, 3);
  arena.passed(1, 2);
  EXPECT_FALSE(arena.find(12 * kMiB, 2, false));
  arena.passed(1, 3);
  EXPECT_EQ(arena.find(21 * kMiB, 2, false)->address, first);
}

TEST(PoolArena, AStreamThatWaitsForAnotherHasWhatThatFreed) {
  PoolArena arena(kBase, 1);
  const auto first = allocate(arena, 10 * kMiB, 1);
  allocate(arena, kMiB, 1);
  const auto later = allocate(arena, 21 * kMiB, 1);
  arena.give(first, 1, 1);
  arena.give(later, 1, 7);
  EXPECT_TRUE(arena.would_fit(21 * kMiB));
  EXPECT_FALSE(arena.would_fit(22 * kMiB));
  arena.hand_over(1, 6, 2, 8);
  EXPECT_EQ(arena.find(10 * kMiB, 2, false)->address, first);
  EXPECT_FALSE(arena.find(21 * kMiB, 2, false)) << "it was freed later";
  EXPECT_EQ(arena.find(21 * kMiB, 1, false)->address, later);
  // The stream that waits may still be at work in it.
  arena.passed(1, 6);
  arena.passed(2, 7);
  EXPECT_FALSE(arena.find(10 * kMiB, 3, false));
  arena.passed(2, 8);
  EXPECT_EQ(arena.find(10 * kMiB, 3, false)->address, first);
}

TEST(PoolArena, GivesBackOnlyWholeUnitsThatNothingIsIn) {
  PoolArena arena(kBase, 8);
  const auto first = allocate(arena, 70 * kMiB, 1);
  const auto last = allocate(arena, kMiB, 1);
  EXPECT_TRUE(arena.idle().empty());
  arena.give(first, 1, 1);
  EXPECT_TRUE(arena.idle().empty()) << "the stream may be at work in it";
  arena.passed(1, 1);
  EXPECT_EQ(arena.idle(), (std::vector<std::size_t>{1, 0}));
  arena.set_present(1, false);
  EXPECT_EQ(arena.reserved(), 64 * kMiB);
  // What is not present is no place without growing.
  EXPECT_FALSE(arena.find(40 * kMiB, 1, false));
  EXPECT_EQ(arena.find(40 * kMiB, 1, true)->missing, (std::vector<std::size_t>{1}));
  EXPECT_TRUE(arena.give_to_all(last));
  EXPECT_EQ(arena.idle(), (std::vector<std::size_t>{2, 0}));
}

// Against a list of bytes, each with who may use it.
TEST(PoolArena, NeverGivesOutWhatOthersMayUse) {
  std::mt19937 random(20261126);
  const auto below = [&](std::size_t most) { return static_cast<std::size_t>(random()) % most; };
  for (int run = 0; run < 40; ++run) {
    PoolArena arena(kBase, 12);
    struct Freed {
      CUdeviceptr from = 0;
      CUdeviceptr to = 0;
      StreamId stream = 0;
      FreeNumber number = 0;
    };
    std::map<CUdeviceptr, std::size_t> used;  // asked
    std::vector<Freed> freed;                 // and not passed
    FreeNumber last = 0;
    std::uint64_t sum = 0;
    const auto end_of = [](CUdeviceptr address, std::size_t bytes) {
      return address + (bytes + 511) / 512 * 512;
    };
    for (int step = 0; step < 600; ++step) {
      const StreamId stream = 1 + below(3);
      const auto action = below(10);
      if (action < 5) {
        const auto bytes = 1 + below(below(4) == 0 ? 60 * kMiB : 3 * kMiB);
        const auto at = allocate(arena, bytes, stream);
        if (!at) continue;
        const auto end = end_of(at, bytes);
        for (const auto& [other, asked] : used)
          ASSERT_FALSE(at < end_of(other, asked) && other < end) << "in use";
        for (const auto& one : freed)
          ASSERT_FALSE(one.stream != stream && at < one.to && one.from < end)
              << "another stream is not past it";
        // What it takes of its own is its own again.
        std::vector<Freed> rest;
        for (const auto& one : freed) {
          if (one.to <= at || one.from >= end) {
            rest.push_back(one);
            continue;
          }
          if (one.from < at) rest.push_back({one.from, at, one.stream, one.number});
          if (one.to > end) rest.push_back({end, one.to, one.stream, one.number});
        }
        freed = rest;
        used[at] = bytes;
        sum += bytes;
      } else if (action < 8 && !used.empty()) {
        auto one = used.begin();
        std::advance(one, static_cast<std::ptrdiff_t>(below(used.size())));
        if (below(6) == 0) {
          ASSERT_TRUE(arena.give_to_all(one->first));
        } else {
          ASSERT_TRUE(arena.give(one->first, stream, ++last));
          freed.push_back({one->first, end_of(one->first, one->second), stream, last});
        }
        sum -= one->second;
        used.erase(one);
      } else if (action == 8 && below(3) == 0) {
        const StreamId to = 1 + below(3);
        const FreeNumber until = last - std::min<FreeNumber>(last, below(6));
        ++last;
        if (to == stream) continue;
        // What lies side by side goes as one, with the later of its numbers: so perhaps less.
        arena.hand_over(stream, until, to, last);
        std::vector<Freed> still;
        for (auto one : freed) {
          if (one.stream == stream && one.number <= until) {
            one.stream = 0;
          }
          still.push_back(one);
        }
        freed = still;
        // Until both have come past it.
        arena.passed(stream, last);
        arena.passed(to, last);
        std::erase_if(freed, [&](const Freed& one) {
          return one.stream == 0 || one.stream == stream || one.stream == to;
        });
      } else if (action == 8) {
        const FreeNumber number = last - std::min<FreeNumber>(last, below(6));
        arena.passed(stream, number);
        std::erase_if(
            freed, [&](const Freed& one) { return one.stream == stream && one.number <= number; });
      } else {
        for (const auto unit : arena.idle()) {
          const auto from = arena.address_of(unit);
          for (const auto& [other, asked] : used)
            ASSERT_FALSE(from < end_of(other, asked) && other < from + PoolArena::kUnit);
          for (const auto& one : freed)
            ASSERT_FALSE(from < one.to && one.from < from + PoolArena::kUnit);
          if (below(2)) arena.set_present(unit, false);
        }
      }
      ASSERT_EQ(arena.used(), sum);
      ASSERT_EQ(arena.empty(), used.empty() && freed.empty());
    }
    for (const auto& [at, asked] : used)
      arena.give_to_all(at);
    for (StreamId stream = 1; stream <= 3; ++stream)
      arena.passed(stream, last);
    EXPECT_TRUE(arena.empty());
    EXPECT_EQ(arena.idle().size() * PoolArena::kUnit, arena.reserved());
  }
}

}  // namespace
}  // namespace stasis::preload
