// Small memory of cuMemAlloc, whose pieces share units: what becomes of a unit when pieces,
// contexts and threads come and go.
#include <algorithm>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "agent_memory_fixture.h"

namespace stasis::preload {
namespace {

class AgentSmallMemory : public AgentMemory {};

// A dma-buf begins and ends at pages, and so may be of several pieces.
TEST_F(AgentSmallMemory, ASmallPieceThatADeviceHasKeepsItsUnitUntilItIsFreed) {
  const auto one = allocated(4096);
  const auto two = allocated(512);
  const auto three = allocated(512);
  int fd = -1;
  EXPECT_EQ(hooks::cuMemGetHandleForAddressRange(&fd, one, 4608, 1, 0), CUDA_SUCCESS);
  for (const auto piece : {one, two}) {
    EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 1);
    EXPECT_EQ(movable_bytes(), 0U);
    EXPECT_EQ(hooks::cuMemFree_v2(piece), CUDA_SUCCESS);
  }
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 0);
  EXPECT_EQ(movable_bytes(), 2 * kMiB);
  EXPECT_EQ(hooks::cuMemFree_v2(three), CUDA_SUCCESS);
}

TEST_F(AgentSmallMemory, SmallPiecesShareAUnitAndLeaveWithIt) {
  const auto one = allocated(kMiB);
  const auto two = allocated(100);
  const auto three = allocated(kMiB - 512);
  EXPECT_EQ(fake().live_objects(), 1);
  EXPECT_EQ(two, one + kMiB);
  EXPECT_EQ(three, two + 512);
  EXPECT_EQ(hooks::cuMemFree_v2(two), CUDA_SUCCESS);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  EXPECT_EQ(hooks::cuMemGetAddressRange_v2(&base, &size, three + 5), CUDA_SUCCESS);
  EXPECT_EQ(base, three);
  EXPECT_EQ(size, kMiB - 512);
  EXPECT_EQ(hooks::cuMemGetAddressRange_v2(&base, &size, two), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(hooks::cuMemFree_v2(two), CUDA_ERROR_INVALID_VALUE) << "twice";
  EXPECT_EQ(hooks::cuMemFree_v2(three + 512), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(hooks::cuMemUnmap(one, 2 * kMiB), CUDA_ERROR_INVALID_VALUE);
  cycle();
  EXPECT_EQ(allocated(512), two);
  const auto other = allocated(2 * kMiB - 1);
  EXPECT_EQ(fake().live_objects(), 2);
  for (const auto address : {two, three, one})
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 1);
  EXPECT_EQ(hooks::cuMemFree_v2(other), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
}

// Each free waits for work by a byte of the driver's, which makes a block for it where it has none.
TEST_F(AgentSmallMemory, TheDriverHasABlockWhileThereAreSmallPieces) {
  EXPECT_TRUE(fake().own_allocations.empty());
  const auto one = allocated(100);
  const auto two = allocated(100);
  EXPECT_EQ(fake().own_allocations.size(), 1U);
  EXPECT_EQ(hooks::cuMemFree_v2(one), CUDA_SUCCESS);
  EXPECT_EQ(fake().own_allocations.size(), 1U);
  EXPECT_EQ(hooks::cuMemFree_v2(two), CUDA_SUCCESS);
  EXPECT_TRUE(fake().own_allocations.empty());
}

TEST_F(AgentSmallMemory, SmallPiecesGoWithTheirContext) {
  const auto here = allocated(kMiB);
  CUcontext other = nullptr;
  ASSERT_EQ(hooks::cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
  const auto there = allocated(kMiB);
  EXPECT_EQ(fake().live_objects(), 2) << "two contexts share no unit";
  EXPECT_EQ(hooks::cuMemFreeAsync(allocated(4096), nullptr), CUDA_SUCCESS);
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent_v2(&popped);
  ASSERT_EQ(hooks::cuCtxDestroy_v2(other), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 1);
  EXPECT_EQ(hooks::cuMemFree_v2(there), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(hooks::cuMemFree_v2(here), CUDA_SUCCESS);
}

// Another thread allocates before the driver ends what the context holds, and behind it.
TEST_F(AgentSmallMemory, SmallPiecesOfAContextThatIsResetGoWithTheirUnit) {
  fake().contexts[FakeDriver::kPrimary] = 0;
  CUcontext primary = nullptr;
  ASSERT_EQ(hooks::cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
  fake().current = {primary};
  (void)allocated(512);
  CUdeviceptr beside = 0;
  fake().within("cuDevicePrimaryCtxReset", [&] { beside = allocated(512); });
  ASSERT_EQ(hooks::cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_EQ(tables().allocations.size(), 0U);
  EXPECT_EQ(hooks::cuMemFree_v2(beside), CUDA_ERROR_INVALID_VALUE);
  const auto after = allocated(512);
  EXPECT_EQ(fake().live_objects(), 1);
  EXPECT_EQ(hooks::cuMemFree_v2(after), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
}

// The driver says what there is to say of it.
TEST_F(AgentSmallMemory, WhatIsAllocatedWhileItsContextEndsDoesNotOutliveThat) {
  for (const std::size_t bytes : {kMiB, 4 * kMiB}) {
    CUcontext other = nullptr;
    ASSERT_EQ(hooks::cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
    fake().within("cuMemCreate", [&] { EXPECT_EQ(hooks::cuCtxDestroy_v2(other), CUDA_SUCCESS); });
    const auto address = allocated(bytes);
    EXPECT_TRUE(fake().own_allocations.contains(address));
    EXPECT_EQ(fake().live_objects(), 0);
    EXPECT_TRUE(fake().reserved.empty());
    EXPECT_TRUE(tables().allocations.empty());
  }
}

// Another has come to its place since this thread looked: it goes, as with the driver, and no more.
TEST_F(AgentSmallMemory, ASmallPieceThatTwoThreadsFreeTakesNoOtherAlong) {
  const auto one = allocated(4096);
  const auto two = allocated(512);
  fake().within("cuMemFree", [&] {
    EXPECT_EQ(hooks::cuMemFree_v2(one), CUDA_SUCCESS);
    EXPECT_EQ(allocated(512), one);
    EXPECT_EQ(allocated(3584), one + 512);
  });
  EXPECT_EQ(hooks::cuMemFree_v2(one), CUDA_SUCCESS);
  EXPECT_EQ(allocated(1024), two + 512) << "what is in use was given out";
}

TEST_F(AgentSmallMemory, TwoThreadsThatMakeTheFirstSmallPieceShareItsUnit) {
  CUdeviceptr other = 0;
  fake().within("cuMemCreate", [&] { other = allocated(512); });
  const auto one = allocated(512);
  EXPECT_EQ(one, other + 512);
  EXPECT_EQ(fake().live_objects(), 1);
  // A unit that the other has filled meanwhile.
  CUdeviceptr filling = 0;
  fake().within("cuMemCreate", [&] { filling = allocated(2 * kMiB - 512); });
  const auto two = allocated(2 * kMiB - 512);
  EXPECT_EQ(fake().live_objects(), 3);
  EXPECT_FALSE(fake().own_allocations.contains(two));
  for (const auto address : {one, other, filling, two})
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
}

TEST_F(AgentSmallMemory, SmallPiecesAreAccessibleToPeersThatWereEnabledBefore) {
  CUcontext peer = nullptr;
  ASSERT_EQ(hooks::cuCtxCreate_v2(&peer, 0, 1), CUDA_SUCCESS);
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent_v2(&popped);
  const auto before = allocated(512);
  {
    const CurrentContext current(peer);
    ASSERT_EQ(hooks::cuCtxEnablePeerAccess(context_, 0), CUDA_SUCCESS);
  }
  ASSERT_EQ(allocated(kMiB), before + 512) << "in the same unit";
  const auto& rights = tables().mappings.at(before).access;
  EXPECT_TRUE(std::any_of(rights.begin(), rights.end(), [](const Access& access) {
    return access.right.location.id == 1 &&
           access.right.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }));
}

}  // namespace
}  // namespace stasis::preload
