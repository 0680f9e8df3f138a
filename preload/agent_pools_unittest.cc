// Stream-ordered memory that the agent serves, on a driver whose streams do what the test says.
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "eviction.h"
#include "eviction_internal.h"
#include "fake_driver.h"
#include "hooks.h"
#include "pools.h"

namespace stasis::preload {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kMiB = std::size_t{1} << 20;
const CUstream kOne = reinterpret_cast<CUstream>(0x100);
const CUstream kTwo = reinterpret_cast<CUstream>(0x200);

class AgentPools : public ::testing::Test {
 public:
  AgentPools() {
    forget_everything();
    EXPECT_EQ(own::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  }
  ~AgentPools() override { EXPECT_EQ(fake().called_with_lock, std::set<std::string>{}); }

 protected:
  static CUdeviceptr allocated(std::size_t bytes, CUstream stream = kOne) {
    CUdeviceptr address = 0;
    EXPECT_EQ(own::cuMemAllocAsync(&address, bytes, stream), CUDA_SUCCESS);
    return address;
  }
  static void set_threshold(std::uint64_t bytes) {
    EXPECT_EQ(own::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
                                         CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes),
              CUDA_SUCCESS);
  }
  static std::uint64_t attribute(CUmemPool_attribute which) {
    std::uint64_t value = 0;
    EXPECT_EQ(own::cuMemPoolGetAttribute(FakeDriver::default_pool(0), which, &value), CUDA_SUCCESS);
    return value;
  }
  static std::uint64_t reserved() { return attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT); }

  CUcontext context_ = nullptr;
};

TEST_F(AgentPools, ServesAndGivesBackAtTheNextWait) {
  const auto first = allocated(40 * kMiB);
  EXPECT_EQ(fake().calls["cuMemAllocAsync"], 0) << "the driver was asked";
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 40 * kMiB);
  EXPECT_EQ(own::cuMemFreeAsync(first, kOne), CUDA_SUCCESS);
  EXPECT_EQ(own::cuMemFreeAsync(first, kOne), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0U);
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(own::cuStreamSynchronize(kOne), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 0U);
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 64 * kMiB);
  EXPECT_EQ(fake().live_objects(), 0);
}

TEST_F(AgentPools, KeepsAsMuchAsTheThresholdSays) {
  set_threshold(64 * kMiB);
  const auto first = allocated(40 * kMiB);
  const auto second = allocated(100 * kMiB);
  own::cuMemFreeAsync(second, kOne);
  own::cuStreamSynchronize(kOne);
  EXPECT_EQ(reserved(), 64 * kMiB);
  own::cuMemFreeAsync(first, kOne);
  own::cuStreamSynchronize(kOne);
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(own::cuMemPoolTrimTo(FakeDriver::default_pool(0), 40 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(own::cuMemPoolTrimTo(FakeDriver::default_pool(0), 0), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 0U);
}

TEST_F(AgentPools, AStreamThatIsNotDoneKeepsItsMemoryFromOthers) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(40 * kMiB);
  own::cuMemFreeAsync(first, kOne);
  EXPECT_EQ(allocated(40 * kMiB, kOne), first) << "its own stream has it at once";
  own::cuMemFreeAsync(first, kOne);
  const auto second = allocated(40 * kMiB, kTwo);
  EXPECT_NE(second, first);
  fake().finish(kOne);
  EXPECT_EQ(allocated(40 * kMiB, kTwo), first);
}

TEST_F(AgentPools, AProgramThatForbidsToLookHasItOnlyWhenItHasWaitedItself) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(40 * kMiB);
  int no = 0;
  own::cuMemPoolSetAttribute(FakeDriver::default_pool(0), CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
                             &no);
  own::cuMemFreeAsync(first, kOne);
  fake().finish(kOne);
  const auto second = allocated(40 * kMiB, kTwo);
  EXPECT_NE(second, first);
  own::cuStreamSynchronize(kOne);
  EXPECT_EQ(allocated(40 * kMiB, kTwo), first);
}

TEST_F(AgentPools, AFullGpuMakesStreamsWaitForEachOther) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(30 * kMiB);
  own::cuMemFreeAsync(first, kOne);
  // No more memory, and the first stream is not done.
  fake().fail_at("cuMemCreate", 1);
  EXPECT_EQ(allocated(30 * kMiB, kTwo), first);
  ASSERT_EQ(fake().waits.size(), 1U);
  EXPECT_EQ(fake().waits[0].first, kTwo);
  EXPECT_EQ(fake().events[fake().waits[0].second].stream, kOne);
}

TEST_F(AgentPools, OtherMemoryGetsWhatAPoolOnlyKeeps) {
  set_threshold(UINT64_MAX);
  own::cuMemFreeAsync(allocated(60 * kMiB), kOne);
  own::cuStreamSynchronize(kOne);
  EXPECT_EQ(reserved(), 64 * kMiB);
  fake().fail_at("cuMemCreate", 1);
  CUdeviceptr address = 0;
  EXPECT_EQ(own::cuMemAlloc_v2(&address, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(fake().calls["cuMemAlloc"], 0) << "the driver was asked";
  EXPECT_EQ(reserved(), 0U);
}

TEST_F(AgentPools, AFailureInTheMiddleOfGrowingLeavesNothing) {
  int no = 0;
  own::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
                             CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &no);
  for (const auto* call : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    for (int nth = 1; nth <= 3; ++nth) {
      if (nth > 1 && std::string(call) == "cuMemSetAccess") break;
      fake().fail_at(call, nth);
      const auto before = fake().calls["cuMemAllocAsync"];
      const auto address = allocated(90 * kMiB);
      EXPECT_EQ(fake().calls["cuMemAllocAsync"], before + 1) << call << " " << nth;
      EXPECT_EQ(fake().live_objects(), 0) << call << " " << nth;
      EXPECT_EQ(reserved(), 0U);
      EXPECT_TRUE(fake().maps.empty());
      own::cuMemFreeAsync(address, kOne);
    }
  }
}

TEST_F(AgentPools, LeavesWithTheProgramAndComesBackWhereItWas) {
  const auto first = allocated(40 * kMiB);
  allocated(5 * kMiB, kTwo);
  own::cuMemFreeAsync(first, kOne);
  const auto maps = fake().maps.size();
  const auto inventory = take_inventory();
  EXPECT_EQ(inventory.bytes, 64 * kMiB);
  EXPECT_EQ(inventory.staying, 0U);
  ASSERT_TRUE(empty_all().ok());
  EXPECT_EQ(fake().live_objects(), 0);
  ASSERT_TRUE(refill_all().ok());
  EXPECT_EQ(fake().maps.size(), maps);
  EXPECT_EQ(allocated(40 * kMiB, kOne), first);
}

TEST_F(AgentPools, MemoryOfCuMemAllocIsFreedWhenTheStreamGetsThere) {
  CUdeviceptr address = 0;
  EXPECT_EQ(own::cuMemAlloc_v2(&address, 8 * kMiB), CUDA_SUCCESS);
  // Whichever context is current, and it stays so.
  CUcontext second = nullptr;
  EXPECT_EQ(own::cuCtxCreate_v2(&second, 0, 1), CUDA_SUCCESS);
  fake().stream_contexts[kOne] = context_;
  EXPECT_EQ(own::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  EXPECT_EQ(fake().current, (std::vector{context_, second}));
  EXPECT_EQ(fake().live_objects(), 1) << "the stream is not there yet";
  EXPECT_EQ(fake().calls["cuMemFree"], 0) << "it waited for all work";
  EXPECT_EQ(own::cuMemFree_v2(address), CUDA_ERROR_INVALID_VALUE);
  own::cuStreamSynchronize(kOne);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
}

TEST_F(AgentPools, AFreeThatCannotBeMarkedLeavesTheMemory) {
  CUdeviceptr address = 0;
  EXPECT_EQ(own::cuMemAlloc_v2(&address, 8 * kMiB), CUDA_SUCCESS);
  const auto pooled = allocated(kMiB);
  for (const auto* call : {"cuEventCreate", "cuEventRecord"}) {
    for (const auto memory : {address, pooled}) {
      fake().fail_at(call, 1);
      EXPECT_NE(own::cuMemFreeAsync(memory, kOne), CUDA_SUCCESS) << call;
    }
  }
  EXPECT_EQ(own::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  EXPECT_EQ(own::cuMemFreeAsync(pooled, kOne), CUDA_SUCCESS);
}

TEST_F(AgentPools, AContextThatEndsHasDoneAllItsWork) {
  set_threshold(UINT64_MAX);
  CUcontext second = nullptr;
  EXPECT_EQ(own::cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
  fake().stream_contexts[kTwo] = second;
  const auto first = allocated(40 * kMiB, kTwo);
  const auto kept = allocated(kMiB, kTwo);
  own::cuMemFreeAsync(first, kTwo);
  EXPECT_EQ(own::cuCtxDestroy_v2(second), CUDA_SUCCESS);
  fake().events.clear();
  EXPECT_EQ(allocated(40 * kMiB, kOne), first);
  // Memory of a pool is no context's.
  EXPECT_TRUE(pool_block_at(kept));
  EXPECT_EQ(own::cuMemFreeAsync(kept, kOne), CUDA_SUCCESS);
}

TEST_F(AgentPools, APoolThatIsDestroyedGoesWithTheLastOfIt) {
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemoryPool pool = nullptr;
  EXPECT_EQ(own::cuMemPoolCreate(&pool, &props), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  EXPECT_EQ(own::cuMemAllocFromPoolAsync(&address, 5 * kMiB, pool, kOne), CUDA_SUCCESS);
  EXPECT_EQ(pool_block_at(address)->pool, pool);
  EXPECT_EQ(own::cuMemPoolDestroy(pool), CUDA_SUCCESS);
  EXPECT_TRUE(pool_block_at(address));
  own::cuMemFreeAsync(address, kOne);
  EXPECT_FALSE(fake().reserved.empty());
  own::cuStreamSynchronize(kOne);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
  EXPECT_FALSE(in_pool(address));
}

TEST_F(AgentPools, PoolsThatOthersMayOpenOrThatHaveALimitAreTheDrivers) {
  for (const bool limited : {false, true}) {
    CUmemPoolProps props{};
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    if (limited)
      props.maxSize = 64 * kMiB;
    else
      props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemoryPool pool = nullptr;
    EXPECT_EQ(own::cuMemPoolCreate(&pool, &props), CUDA_SUCCESS);
    CUdeviceptr address = 0;
    EXPECT_EQ(own::cuMemAllocFromPoolAsync(&address, 5 * kMiB, pool, kOne), CUDA_SUCCESS);
    EXPECT_FALSE(in_pool(address));
    EXPECT_EQ(own::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  }
  EXPECT_EQ(fake().calls["cuMemAllocFromPoolAsync"], 2);
}

TEST_F(AgentPools, OtherDevicesGetTheRightsThatThePoolGives) {
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const auto first = allocated(kMiB);
  fake().rights.clear();
  EXPECT_EQ(own::cuMemPoolSetAccess(FakeDriver::default_pool(0), &right, 1), CUDA_SUCCESS);
  ASSERT_EQ(fake().rights.size(), 1U);
  EXPECT_EQ(fake().rights[0].second.location.id, 1);
  allocated(40 * kMiB);
  EXPECT_EQ(fake().rights.size(), 3U) << "what comes later has them too";
  fake().rights.clear();
  (void)take_inventory();
  ASSERT_TRUE(empty_all().ok());
  ASSERT_TRUE(refill_all().ok());
  std::set<int> devices;
  for (const auto& [address, given] : fake().rights)
    if (address == first) devices.insert(given.location.id);
  EXPECT_EQ(devices, (std::set<int>{0, 1})) << "after it has been away";
}

TEST_F(AgentPools, WhatACaptureAllocatesIsTheDriversAndItFreesNothingOfOurs) {
  const auto before = allocated(kMiB);
  EXPECT_EQ(own::cuStreamBeginCapture_v2(kTwo, 0), CUDA_SUCCESS);
  fake().captured.insert(kTwo);
  CUdeviceptr node = 0;
  EXPECT_EQ(own::cuMemAllocAsync(&node, kMiB, kTwo), CUDA_SUCCESS);
  EXPECT_FALSE(in_pool(node));
  EXPECT_EQ(fake().calls["cuMemAllocAsync"], 1);
  EXPECT_EQ(own::cuMemFreeAsync(before, kTwo), CUDA_ERROR_INVALID_VALUE);
  // Beside it the driver says whether one may, and it spoils the capture as it does.
  fake().fail_at("cuMemPoolGetAttribute", 1);
  EXPECT_NE(own::cuMemAllocAsync(&node, kMiB, kOne), CUDA_SUCCESS);
  fake().fail_at("cuMemPoolGetAttribute", 1);
  EXPECT_NE(own::cuMemFreeAsync(before, kOne), CUDA_SUCCESS);
  fake().fail_at("cuMemPoolGetAttribute", 1);
  EXPECT_NE(own::cuMemFree_v2(before), CUDA_SUCCESS);
  fake().captured.clear();
  EXPECT_EQ(own::cuStreamEndCapture(kTwo, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(own::cuMemFree_v2(before), CUDA_SUCCESS);
}

TEST_F(AgentPools, TheProgramMayNotMapOrUnmapAPoolsMemory) {
  const auto address = allocated(5 * kMiB);
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ};
  EXPECT_EQ(own::cuMemUnmap(address, 2 * kMiB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(own::cuMemSetAccess(address, 2 * kMiB, &right, 1), CUDA_ERROR_INVALID_VALUE);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(own::cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(AgentPools, AProgramThatNeverWaitsLeavesFewMarks) {
  set_threshold(UINT64_MAX);
  for (int i = 0; i < 1000; ++i) {
    own::cuMemFreeAsync(allocated(kMiB), kOne);
    if (i % 10 == 0) fake().finish(kOne);
  }
  EXPECT_LT(fake().events.size(), 100U);
}

TEST_F(AgentPools, AChildThatIsForkedHasNone) {
  const auto address = allocated(5 * kMiB);
  forget_memory_after_fork();
  EXPECT_FALSE(in_pool(address));
  EXPECT_FALSE(pool_block_at(address));
}

}  // namespace
}  // namespace stasis::preload
