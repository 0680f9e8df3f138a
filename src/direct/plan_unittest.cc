#include "direct/plan.h"

#include <unistd.h>

#include <gtest/gtest.h>

namespace stasis::direct {
namespace {

constexpr std::uint64_t kOneMiB = std::uint64_t{1} << 20;

Segment segment(std::uint64_t offset, std::uint64_t bytes) {
  return {UniqueFd(::dup(STDIN_FILENO)), bytes, offset};
}

template <class... S>
std::vector<Segment> list(S... segments) {
  std::vector<Segment> out;
  (out.push_back(std::move(segments)), ...);
  return out;
}

std::vector<Stretch> stretches(const std::vector<Segment>& segments) {
  std::vector<Stretch> out;
  std::uint64_t mapped = 0;
  for (const Segment& one : segments) {
    append_stretch(out, {mapped, one.offset, one.bytes});
    mapped += one.bytes;
  }
  return out;
}

TEST(Plan, JoinsWhatIsNeighboursOnBothSides) {
  const auto joined =
      stretches(list(segment(0, 2 * kOneMiB), segment(2 * kOneMiB, 4 * kOneMiB),
                     segment(10 * kOneMiB, 2 * kOneMiB), segment(12 * kOneMiB, 2 * kOneMiB)));
  ASSERT_EQ(joined.size(), 2U);
  EXPECT_EQ(joined[0].bytes, 6 * kOneMiB);
  EXPECT_EQ(joined[1].mapped, 6 * kOneMiB);
  EXPECT_EQ(joined[1].content, 10 * kOneMiB);
  EXPECT_EQ(joined[1].bytes, 4 * kOneMiB);
}

TEST(Plan, CopiesAThousandSmallSegmentsWithFewLoadsWhereverTheirContentLies) {
  std::vector<Segment> segments;
  for (std::uint64_t i = 0; i < 1000; ++i)
    segments.push_back(segment(i * 6 * kOneMiB, 2 * kOneMiB));
  const auto loads = loads_of(stretches(segments), 32 * kOneMiB);
  EXPECT_EQ(loads.size(), 63U);
  EXPECT_EQ(loads.front().parts.size(), 16U);
}

TEST(Plan, CoversEveryByteOnce) {
  const auto loads =
      loads_of(stretches(list(segment(8 * kOneMiB, 6 * kOneMiB), segment(14 * kOneMiB, 4 * kOneMiB),
                              segment(30 * kOneMiB, 2 * kOneMiB))),
               5 * kOneMiB);
  std::uint64_t mapped = 0;
  std::uint64_t bytes = 0;
  for (const Load& load : loads) {
    EXPECT_EQ(load.mapped, mapped);
    EXPECT_LE(load.bytes, 5 * kOneMiB);
    std::uint64_t at = 0;
    for (const Stretch& part : load.parts) {
      EXPECT_EQ(part.mapped, at);
      at += part.bytes;
      // Content is 8 MiB ahead of the mapping in the first two, and 20 in the third.
      const std::uint64_t ahead = part.content - (load.mapped + part.mapped);
      EXPECT_EQ(ahead, part.content < 30 * kOneMiB ? 8 * kOneMiB : 20 * kOneMiB);
    }
    EXPECT_EQ(at, load.bytes);
    mapped += load.bytes;
    bytes += load.bytes;
  }
  EXPECT_EQ(bytes, 12 * kOneMiB);
}

TEST(Plan, GivesEveryThreadSomethingToDo) {
  EXPECT_EQ(load_size(64 << 10 << 10 << 4, 16, 32 * kOneMiB), 16 * kOneMiB);
  EXPECT_EQ(load_size(16 * kOneMiB, 16, 32 * kOneMiB), 2 * kOneMiB);
  EXPECT_EQ(load_size(std::uint64_t{80} << 30, 16, 32 * kOneMiB), 32 * kOneMiB);
  EXPECT_EQ(load_size(std::uint64_t{80} << 30, 16, 1 * kOneMiB), 1 * kOneMiB);
}

TEST(Plan, RefusesSegmentsThatMakeNoSense) {
  const auto refused = [](std::vector<Segment> segments) {
    const auto checked = sort_and_check(segments);
    return !checked && checked.error().code == ErrorCode::kUsage;
  };
  EXPECT_FALSE(refused(list(segment(4 * kOneMiB, 2 * kOneMiB), segment(0, 4 * kOneMiB))));
  EXPECT_TRUE(refused(list(segment(0, 0))));
  EXPECT_TRUE(refused(list(segment(0, 4096))));
  EXPECT_TRUE(refused(list(segment(0, 4 * kOneMiB), segment(2 * kOneMiB, 2 * kOneMiB))));
  EXPECT_TRUE(refused(list(segment(~std::uint64_t{0} - kOneMiB, 2 * kOneMiB))));
  EXPECT_TRUE(refused(list(Segment{UniqueFd(), 2 * kOneMiB, 0})));
}

TEST(Plan, SharesTheRing) {
  auto one = share_ring(32 * kOneMiB, 32, 1, 16);
  ASSERT_TRUE(one);
  EXPECT_EQ(one->threads, 16U);
  EXPECT_EQ(one->buffer_bytes, 32 * kOneMiB);
  // Eight GPUs: smaller buffers come before fewer threads.
  auto eight = share_ring(32 * kOneMiB, 32, 8, 16);
  ASSERT_TRUE(eight);
  EXPECT_EQ(eight->threads, 16U);
  EXPECT_EQ(eight->buffer_bytes, 4 * kOneMiB);
  EXPECT_GE(32 * eight->buffers_per_chunk, 2U * 16 * 8);
  // And fewer threads where they would get too small.
  auto tight = share_ring(2 * kOneMiB, 2, 2, 16);
  ASSERT_TRUE(tight);
  EXPECT_EQ(tight->threads, 1U);
  EXPECT_EQ(tight->buffer_bytes, 1 * kOneMiB);
  // A thread for each, at least.
  auto many = share_ring(2 * kOneMiB, 4, 16, 16);
  ASSERT_TRUE(many);
  EXPECT_EQ(many->threads, 1U);
  EXPECT_EQ(many->buffer_bytes, kOneMiB / 4);
  EXPECT_TRUE(share_ring(2 * kOneMiB, 4, 64, 16));
  auto none = share_ring(2 * kOneMiB, 1, 64, 16);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kUsage);
}

TEST(Plan, DividesStretchesWhereTheyAreMapped) {
  const std::vector<Stretch> all{{0, 100, 10}, {10, 200, 20}};
  EXPECT_EQ(first_of(all, 0), std::vector<Stretch>());
  EXPECT_EQ(first_of(all, 10), (std::vector<Stretch>{{0, 100, 10}}));
  EXPECT_EQ(first_of(all, 15), (std::vector<Stretch>{{0, 100, 10}, {10, 200, 5}}));
  EXPECT_EQ(first_of(all, 99), all);
  EXPECT_EQ(rest_of(all, 0), all);
  EXPECT_EQ(rest_of(all, 4), (std::vector<Stretch>{{4, 104, 6}, {10, 200, 20}}));
  EXPECT_EQ(rest_of(all, 15), (std::vector<Stretch>{{15, 205, 15}}));
  EXPECT_EQ(rest_of(all, 30), std::vector<Stretch>());
}

}  // namespace
}  // namespace stasis::direct
