#include "direct/gpu_digest.h"

#include <gtest/gtest.h>

namespace stasis::direct {
namespace {

constexpr std::uint64_t kChunk = 256U << 10;

TEST(GpuDigest, AsksForWholeChunksOfTheContentOnly) {
  // The second begins within a chunk of the content, the third is shorter than one.
  const std::vector<Stretch> stretches{{0, 4 * kChunk, 3 * kChunk},
                                       {3 * kChunk, 20 * kChunk + 1024, 2 * kChunk},
                                       {5 * kChunk, 30 * kChunk + 512, kChunk}};
  const auto runs = chunk_runs(stretches, kChunk);
  EXPECT_EQ(runs, (std::vector<ChunkRun>{{0, 4 * kChunk, 3},
                                         {3 * kChunk + kChunk - 1024, 21 * kChunk, 1}}));
  EXPECT_TRUE(chunk_runs({}, kChunk).empty());
}

TEST(GpuDigest, WhatIsLeftOutIsLeftOutAndNothingElse) {
  const std::vector<Stretch> stretches{{0, 4 * kChunk, 3 * kChunk},
                                       {3 * kChunk, 9 * kChunk, kChunk / 2},
                                       {3 * kChunk + kChunk / 2, 20 * kChunk + 1024, 2 * kChunk}};
  const auto runs = chunk_runs(stretches, kChunk);
  ASSERT_EQ(runs.size(), 2U);
  const std::vector<char> none(4, 0);
  EXPECT_EQ(without_chunks(stretches, runs, kChunk, none), stretches);
  const std::vector<char> middle{0, 1, 0, 0};
  EXPECT_EQ(
      without_chunks(stretches, runs, kChunk, middle),
      (std::vector<Stretch>{
          {0, 4 * kChunk, kChunk}, {2 * kChunk, 6 * kChunk, kChunk}, stretches[1], stretches[2]}));
  const std::vector<char> all(4, 1);
  const std::uint64_t third = stretches[2].mapped;
  EXPECT_EQ(without_chunks(stretches, runs, kChunk, all),
            (std::vector<Stretch>{stretches[1],
                                  {third, 20 * kChunk + 1024, kChunk - 1024},
                                  {third + 2 * kChunk - 1024, 22 * kChunk, 1024}}));
}

TEST(GpuDigest, NoLoadCrossesWhatIsLeftOut) {
  const std::vector<Stretch> gaps{
      {0, 0, kChunk}, {2 * kChunk, 2 * kChunk, kChunk}, {3 * kChunk, 9 * kChunk, 2 * kChunk}};
  const auto loads = loads_of_each(gaps, 2 * kChunk);
  ASSERT_EQ(loads.size(), 3U);
  EXPECT_EQ(loads[0].bytes, kChunk);
  EXPECT_EQ(loads[1].mapped, 2 * kChunk);
  EXPECT_EQ(loads[1].parts.size(), 2U);
  EXPECT_EQ(loads[2].mapped, 4 * kChunk);
  EXPECT_EQ(loads[2].bytes, kChunk);
}

}  // namespace
}  // namespace stasis::direct
