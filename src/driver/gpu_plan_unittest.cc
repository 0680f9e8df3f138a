#include "driver/gpu_plan.h"

#include <gtest/gtest.h>

namespace stasis {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

Gpu gpu(unsigned char number, std::uint64_t total, std::uint64_t used) {
  Gpu out;
  out.uuid.bytes[0] = number;
  out.memory_total = total;
  out.memory_used = used;
  return out;
}

TEST(GpuPlan, WhatGoesToAGpuIsCountedThere) {
  const std::vector<Gpu> gpus{gpu(1, 16 * kGiB, 0), gpu(2, 16 * kGiB, 10 * kGiB)};
  const std::vector<GpuUse> needed{{gpus[0].uuid, 4 * kGiB}, {gpus[0].uuid, 3 * kGiB}};
  EXPECT_TRUE(check_gpu_memory(needed, {}, gpus));
  const std::vector<GpuPair> pairs{{gpus[0].uuid, gpus[1].uuid}, {gpus[1].uuid, gpus[0].uuid}};
  const auto refused = check_gpu_memory(needed, pairs, gpus);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfGpuMemory);
  EXPECT_EQ(target_of(gpus[0].uuid, pairs), gpus[1].uuid);
  EXPECT_EQ(target_of(gpus[0].uuid, {}), gpus[0].uuid);
}

TEST(GpuPlan, WhatIsSpareIsLeftWhenAllIsBack) {
  const std::vector<Gpu> gpus{gpu(1, 16 * kGiB, 1 * kGiB), gpu(2, 16 * kGiB, 15 * kGiB)};
  const std::vector<GpuUse> needed{{gpus[0].uuid, 4 * kGiB}, {gpus[0].uuid, 3 * kGiB}};
  const auto here = spare_gpu_memory(needed, {}, gpus);
  ASSERT_EQ(here.size(), 1U) << "the second has less free than is to be left";
  EXPECT_EQ(here.at(gpus[0].uuid), 16 * kGiB - 8 * kGiB - kContextBytes - 1 * kGiB);
  const std::vector<GpuPair> pairs{{gpus[0].uuid, gpus[1].uuid}, {gpus[1].uuid, gpus[0].uuid}};
  const auto there = spare_gpu_memory(needed, pairs, gpus);
  ASSERT_EQ(there.size(), 1U);
  EXPECT_EQ(there.at(gpus[0].uuid), 16 * kGiB - 1 * kGiB - kContextBytes - 1 * kGiB);
}

}  // namespace
}  // namespace stasis
