#include "driver/gpu_choice.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stasis {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint64_t kGiB = 1ULL << 30;

Gpu card(unsigned number, const std::string& model = "H100", std::uint64_t used = 0) {
  Gpu out;
  out.uuid.bytes.fill(0);
  out.uuid.bytes.at(0) = 0xcd;
  out.uuid.bytes.at(3) = static_cast<std::uint8_t>(number);
  out.name = model;
  out.memory_total = 80 * kGiB;
  out.memory_used = used;
  out.pci_bus_id = fmt::format("00000000:{:02X}:00.0", 0x10 + number);
  return out;
}

std::vector<GpuUuid> all_of(const std::vector<Gpu>& gpus) { return allotted_gpus({}, gpus); }

// Where the GPU that `from` is goes.
unsigned goes_to(const std::vector<GpuPair>& pairs, unsigned from) {
  for (const GpuPair& pair : pairs)
    if (pair.from == card(from).uuid) return pair.to.bytes.at(3);
  return 999;
}

TEST(ChooseGpus, StaysWhereItWasIfItCan) {
  const std::vector<Gpu> here = {card(2), card(1), card(0)};
  const std::vector<GpuUse> needed = {{card(1).uuid, kGiB}};
  auto pairs = choose_gpu_map(needed, std::vector{card(0), card(1), card(2)}, here, all_of(here));
  ASSERT_TRUE(pairs);
  for (const GpuPair& pair : *pairs)
    EXPECT_EQ(pair.from, pair.to);
}

TEST(ChooseGpus, TakesAnotherWhereItsOwnIsFullOrNotAllotted) {
  const std::vector<Gpu> from = {card(0), card(1)};
  const std::vector<GpuUse> needed = {{card(0).uuid, 50 * kGiB}};
  const std::vector<Gpu> full = {card(0, "H100", 40 * kGiB), card(1)};
  auto pairs = choose_gpu_map(needed, from, full, all_of(full));
  ASSERT_TRUE(pairs);
  EXPECT_EQ(goes_to(*pairs, 0), 1U);
  EXPECT_EQ(goes_to(*pairs, 1), 0U);
  pairs = choose_gpu_map(needed, from, from, allotted_gpus("1", from));
  ASSERT_TRUE(pairs);
  EXPECT_EQ(goes_to(*pairs, 0), 1U);
}

TEST(ChooseGpus, FindsThePlacesForAllOfThem) {
  // The first that fits the small one is the only one for the large one.
  const std::vector<Gpu> from = {card(0), card(1)};
  const std::vector<Gpu> here = {card(7), card(8, "H100", 70 * kGiB)};
  const std::vector<GpuUse> needed = {{card(0).uuid, kGiB}, {card(1).uuid, 60 * kGiB}};
  auto pairs = choose_gpu_map(needed, from, here, all_of(here));
  ASSERT_TRUE(pairs);
  EXPECT_EQ(goes_to(*pairs, 0), 8U);
  EXPECT_EQ(goes_to(*pairs, 1), 7U);
}

TEST(ChooseGpus, RefusesTheWrongKindAndTooFewWithWhatIsNeeded) {
  const std::vector<Gpu> from = {card(0), card(1)};
  const std::vector<Gpu> others = {card(0), card(5, "A100")};
  const std::vector<GpuUse> both = {{card(0).uuid, kGiB}, {card(1).uuid, kGiB}};
  auto pairs = choose_gpu_map(both, from, others, all_of(others));
  ASSERT_FALSE(pairs);
  EXPECT_EQ(pairs.error().code, ErrorCode::kGpuMismatch);
  EXPECT_THAT(pairs.error().message, HasSubstr("needs 2 x H100"));
  EXPECT_THAT(pairs.error().message, HasSubstr("1 x A100"));
  // One that is not used may become anything.
  const std::vector<GpuUse> one = {{card(0).uuid, kGiB}};
  EXPECT_TRUE(choose_gpu_map(one, from, others, all_of(others)));
  // Too few: allotted, and in all.
  pairs = choose_gpu_map(both, from, from, allotted_gpus("1", from));
  ASSERT_FALSE(pairs);
  EXPECT_THAT(pairs.error().message, HasSubstr("may have 1 x H100"));
  pairs = choose_gpu_map(one, from, std::vector{card(0)}, all_of(from));
  ASSERT_FALSE(pairs);
  EXPECT_THAT(pairs.error().message, HasSubstr("saw 2 GPUs"));
}

TEST(ChooseGpus, SaysThatTheyAreFull) {
  const std::vector<Gpu> here = {card(3, "H100", 79 * kGiB)};
  const std::vector<GpuUse> needed = {{card(0).uuid, 2 * kGiB}};
  auto pairs = choose_gpu_map(needed, std::vector{card(0)}, here, all_of(here));
  ASSERT_FALSE(pairs);
  EXPECT_EQ(pairs.error().code, ErrorCode::kOutOfGpuMemory);
}

TEST(ChooseGpus, WithoutKnownUseAllCountAndNoneIsReserved) {
  const std::vector<Gpu> from = {card(0), card(1)};
  EXPECT_TRUE(choose_gpu_map({}, from, from, allotted_gpus("1", from)));
  const std::vector<Gpu> others = {card(0), card(5, "A100")};
  EXPECT_FALSE(choose_gpu_map({}, from, others, all_of(others)));
}

TEST(AllottedGpus, ReadsWhatCudaReads) {
  const std::vector<Gpu> here = {card(0), card(1), card(2)};
  EXPECT_EQ(allotted_gpus({}, here).size(), 3U);
  EXPECT_THAT(allotted_gpus("", here), IsEmpty());
  EXPECT_THAT(allotted_gpus("-1", here), IsEmpty());
  EXPECT_THAT(allotted_gpus("2,0", here), ElementsAre(card(2).uuid, card(0).uuid));
  EXPECT_THAT(allotted_gpus("1,7,0", here), ElementsAre(card(1).uuid));
  EXPECT_THAT(allotted_gpus(card(1).uuid.to_string(), here), ElementsAre(card(1).uuid));
}

}  // namespace
}  // namespace stasis
