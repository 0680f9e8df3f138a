// What SmallMemory gives out lies in one unit and overlaps nothing that is in use; all of it comes
// back.
#include "small_memory.h"

#include <map>
#include <random>

#include <gtest/gtest.h>

namespace stasis::preload {
namespace {

using cuda::CUdeviceptr;

constexpr std::size_t kUnit = std::size_t{2} << 20;
// The second lies directly behind the first, the third does not.
constexpr CUdeviceptr kFirst = CUdeviceptr{1} << 40;
constexpr CUdeviceptr kSecond = kFirst + kUnit;
constexpr CUdeviceptr kThird = kFirst + 8 * kUnit;

TEST(SmallMemory, LaysPiecesSideBySideAtMultiplesOf512Bytes) {
  SmallMemory memory;
  EXPECT_EQ(memory.take(1), 0U);
  memory.add(kFirst, kUnit);
  EXPECT_EQ(memory.take(1), kFirst);
  EXPECT_EQ(memory.take(513), kFirst + 512);
  EXPECT_EQ(memory.take(512), kFirst + 1536);
  EXPECT_FALSE(memory.give(kFirst + 512, 513));
  EXPECT_FALSE(memory.give(kFirst, 1));
  EXPECT_TRUE(memory.give(kFirst + 1536, 512)) << "the last";
}

TEST(SmallMemory, APieceLiesInOneUnitThoughAnotherBeginsBehindIt) {
  SmallMemory memory;
  memory.add(kFirst, kUnit);
  memory.add(kSecond, kUnit);
  ASSERT_EQ(memory.take(kUnit - 512), kFirst);
  EXPECT_EQ(memory.take(1024), kSecond);
  EXPECT_EQ(memory.take(512), kFirst + kUnit - 512);
  EXPECT_TRUE(memory.give(kSecond, 1024));
  EXPECT_FALSE(memory.give(kFirst + kUnit - 512, 512));
  EXPECT_EQ(memory.take(kUnit), kSecond);
}

TEST(SmallMemory, TheSmallestPlaceIsTaken) {
  SmallMemory memory;
  memory.add(kFirst, kUnit);
  const auto first = memory.take(4096);
  (void)memory.take(512);
  const auto third = memory.take(1024);
  (void)memory.take(512);
  memory.give(first, 4096);
  memory.give(third, 1024);
  EXPECT_EQ(memory.take(1000), third);
  EXPECT_EQ(memory.take(1000), first);
}

TEST(SmallMemory, InAnyOrderNothingOverlapsAndAllComesBack) {
  std::mt19937 random(7);
  SmallMemory memory;
  const std::map<CUdeviceptr, std::size_t> units{
      {kFirst, kUnit}, {kSecond, kUnit}, {kThird, kUnit}};
  for (const auto& [unit, size] : units)
    memory.add(unit, size);
  std::map<CUdeviceptr, std::size_t> used;
  std::size_t refused = 0;
  for (int step = 0; step < 20000; ++step) {
    const bool allocates = used.empty() || random() % 100 < 55;
    if (allocates) {
      const std::size_t bytes = 1 + random() % (random() % 4 == 0 ? kUnit / 4 : 5000);
      const auto address = memory.take(bytes);
      if (address == 0) {
        ++refused;
        continue;
      }
      EXPECT_EQ(address % SmallMemory::kAlignment, 0U);
      const auto unit = std::prev(units.upper_bound(address));
      ASSERT_LE(address + bytes, unit->first + unit->second);
      const auto next = used.lower_bound(address);
      ASSERT_TRUE(next == used.end() || address + bytes <= next->first);
      ASSERT_TRUE(next == used.begin() ||
                  std::prev(next)->first + std::prev(next)->second <= address);
      used.emplace(address, bytes);
    } else {
      const auto one = std::next(used.begin(), static_cast<long>(random() % used.size()));
      memory.give(one->first, one->second);
      used.erase(one);
    }
  }
  EXPECT_GT(refused, 0U);
  std::size_t empty = 0;
  for (const auto& [address, bytes] : used)
    empty += memory.give(address, bytes) ? 1 : 0;
  EXPECT_EQ(empty, units.size());
  for (const auto& [unit, size] : units)
    memory.remove(unit);
  EXPECT_EQ(memory.take(1), 0U);
}

}  // namespace
}  // namespace stasis::preload
