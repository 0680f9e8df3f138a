#include "driver/gpu_plan.h"

#include <gtest/gtest.h>

namespace stasis {
namespace {

constexpr std::uint64_t kOneGiB = std::uint64_t{1} << 30;

Gpu gpu_with(unsigned char number, std::uint64_t total, std::uint64_t used) {
  Gpu out;
  out.uuid.bytes[0] = number;
  out.memory_total = total;
  out.memory_used = used;
  return out;
}

TEST(GpuPlan, WhatGoesToAGpuIsCountedThere) {
  const std::vector<Gpu> gpus{gpu_with(1, 16 * kOneGiB, 0),
                              gpu_with(2, 16 * kOneGiB, 10 * kOneGiB)};
  const std::vector<GpuUse> needed{{gpus[0].uuid, 4 * kOneGiB}, {gpus[0].uuid, 3 * kOneGiB}};
  EXPECT_TRUE(check_gpu_memory(needed, {}, gpus));
  const std::vector<GpuPair> pairs{{gpus[0].uuid, gpus[1].uuid}, {gpus[1].uuid, gpus[0].uuid}};
  const auto refused = check_gpu_memory(needed, pairs, gpus);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfGpuMemory);
  EXPECT_EQ(target_of(gpus[0].uuid, pairs), gpus[1].uuid);
  EXPECT_EQ(target_of(gpus[0].uuid, {}), gpus[0].uuid);
}

TEST(GpuPlan, WhatIsSpareIsLeftWhenAllIsBack) {
  const std::vector<Gpu> gpus{gpu_with(1, 16 * kOneGiB, 1 * kOneGiB),
                              gpu_with(2, 16 * kOneGiB, 15 * kOneGiB)};
  const std::vector<GpuUse> needed{{gpus[0].uuid, 4 * kOneGiB}, {gpus[0].uuid, 3 * kOneGiB}};
  const auto here = spare_gpu_memory(needed, {}, gpus);
  ASSERT_EQ(here.size(), 1U) << "the second has less free than is to be left";
  EXPECT_EQ(here.at(gpus[0].uuid), 16 * kOneGiB - 8 * kOneGiB - kContextBytes - 1 * kOneGiB);
  const std::vector<GpuPair> pairs{{gpus[0].uuid, gpus[1].uuid}, {gpus[1].uuid, gpus[0].uuid}};
  const auto there = spare_gpu_memory(needed, pairs, gpus);
  ASSERT_EQ(there.size(), 1U);
  EXPECT_EQ(there.at(gpus[0].uuid), 16 * kOneGiB - 1 * kOneGiB - kContextBytes - 1 * kOneGiB);
}

}  // namespace
}  // namespace stasis
