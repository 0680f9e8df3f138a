#include "direct/gpu_digest.h"

#include <gtest/gtest.h>

namespace stasis::direct {
namespace {

constexpr std::uint64_t kDigestChunk = 256U << 10;

TEST(GpuDigest, AsksForWholeChunksOfTheContentOnly) {
  // The second begins within a chunk of the content, the third is shorter than one.
  const std::vector<Stretch> stretches{
      {0, 4 * kDigestChunk, 3 * kDigestChunk},
      {3 * kDigestChunk, 20 * kDigestChunk + 1024, 2 * kDigestChunk},
      {5 * kDigestChunk, 30 * kDigestChunk + 512, kDigestChunk}};
  const auto runs = chunk_runs(stretches, kDigestChunk);
  EXPECT_EQ(runs, (std::vector<ChunkRun>{
                      {0, 4 * kDigestChunk, 3},
                      {3 * kDigestChunk + kDigestChunk - 1024, 21 * kDigestChunk, 1}}));
  EXPECT_TRUE(chunk_runs({}, kDigestChunk).empty());
}

TEST(GpuDigest, WhatIsLeftOutIsLeftOutAndNothingElse) {
  const std::vector<Stretch> stretches{
      {0, 4 * kDigestChunk, 3 * kDigestChunk},
      {3 * kDigestChunk, 9 * kDigestChunk, kDigestChunk / 2},
      {3 * kDigestChunk + kDigestChunk / 2, 20 * kDigestChunk + 1024, 2 * kDigestChunk}};
  const auto runs = chunk_runs(stretches, kDigestChunk);
  ASSERT_EQ(runs.size(), 2U);
  const std::vector<char> none(4, 0);
  EXPECT_EQ(without_chunks(stretches, runs, kDigestChunk, none), stretches);
  const std::vector<char> middle{0, 1, 0, 0};
  EXPECT_EQ(without_chunks(stretches, runs, kDigestChunk, middle),
            (std::vector<Stretch>{{0, 4 * kDigestChunk, kDigestChunk},
                                  {2 * kDigestChunk, 6 * kDigestChunk, kDigestChunk},
                                  stretches[1],
                                  stretches[2]}));
  const std::vector<char> all(4, 1);
  const std::uint64_t third = stretches[2].mapped;
  EXPECT_EQ(without_chunks(stretches, runs, kDigestChunk, all),
            (std::vector<Stretch>{stretches[1],
                                  {third, 20 * kDigestChunk + 1024, kDigestChunk - 1024},
                                  {third + 2 * kDigestChunk - 1024, 22 * kDigestChunk, 1024}}));
}

TEST(GpuDigest, NoLoadCrossesWhatIsLeftOut) {
  const std::vector<Stretch> gaps{{0, 0, kDigestChunk},
                                  {2 * kDigestChunk, 2 * kDigestChunk, kDigestChunk},
                                  {3 * kDigestChunk, 9 * kDigestChunk, 2 * kDigestChunk}};
  const auto loads = loads_of_each(gaps, 2 * kDigestChunk);
  ASSERT_EQ(loads.size(), 3U);
  EXPECT_EQ(loads[0].bytes, kDigestChunk);
  EXPECT_EQ(loads[1].mapped, 2 * kDigestChunk);
  EXPECT_EQ(loads[1].parts.size(), 2U);
  EXPECT_EQ(loads[2].mapped, 4 * kDigestChunk);
  EXPECT_EQ(loads[2].bytes, kDigestChunk);
}

}  // namespace
}  // namespace stasis::direct
