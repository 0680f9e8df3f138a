// Stream-ordered memory that the agent serves, on a driver whose streams do what the test says.
// Long because one driver whose streams the test moves by hand serves all cases about pools.
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "eviction.h"
#include "eviction_internal.h"
#include "fake_driver.h"
#include "hooks.h"
#include "intercept.h"
#include "pools.h"
#include "sharing.h"

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
    EXPECT_EQ(hooks::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  }
  ~AgentPools() override { EXPECT_EQ(fake().called_with_lock, std::set<std::string>{}); }

 protected:
  static CUdeviceptr allocated(std::size_t bytes, CUstream stream = kOne) {
    CUdeviceptr address = 0;
    EXPECT_EQ(hooks::cuMemAllocAsync(&address, bytes, stream), CUDA_SUCCESS);
    return address;
  }
  static void set_threshold(std::uint64_t bytes) {
    EXPECT_EQ(hooks::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
                                           CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes),
              CUDA_SUCCESS);
  }
  static std::uint64_t attribute(CUmemPool_attribute which) {
    std::uint64_t value = 0;
    EXPECT_EQ(hooks::cuMemPoolGetAttribute(FakeDriver::default_pool(0), which, &value),
              CUDA_SUCCESS);
    return value;
  }
  static std::uint64_t reserved() { return attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT); }

  CUcontext context_ = nullptr;
};

// The driver saves it and cannot restore it, and the agent cannot give it up: the tool refuses
// that.
TEST_F(AgentPools, AnotherProcessesPoolIsTold) {
  CUmemoryPool pool = nullptr;
  CUdeviceptr address = 0;
  fake().fail_at("cuMemPoolImportFromShareableHandle", 1);
  EXPECT_NE(hooks::cuMemPoolImportFromShareableHandle(&pool, nullptr, {}, 0), CUDA_SUCCESS);
  EXPECT_TRUE(list_shared().empty());
  ASSERT_EQ(hooks::cuMemPoolImportFromShareableHandle(&pool, nullptr, {}, 0), CUDA_SUCCESS);
  CUdeviceptr exported = 0;
  ASSERT_EQ(driver().cuMemAlloc_v2(&exported, kMiB), CUDA_SUCCESS);
  ASSERT_EQ(hooks::cuMemPoolImportPointer(&address, pool, &exported), CUDA_SUCCESS);
  ASSERT_EQ(list_shared().size(), 2U);
  EXPECT_EQ(list_shared().front().role, direct::ShareRole::kForeign);
  std::uint32_t count = 0;
  count_shared(count);
  EXPECT_EQ(count, 2U);
  // What came from it is there until it is freed.
  EXPECT_EQ(hooks::cuMemPoolDestroy(pool), CUDA_SUCCESS);
  EXPECT_EQ(list_shared().size(), 1U);
  EXPECT_EQ(hooks::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  EXPECT_TRUE(list_shared().empty());
}

TEST_F(AgentPools, ServesAndGivesBackAtTheNextWait) {
  const auto first = allocated(40 * kMiB);
  EXPECT_EQ(fake().calls["cuMemAllocAsync"], 0) << "the driver was asked";
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 40 * kMiB);
  EXPECT_EQ(hooks::cuMemFreeAsync(first, kOne), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFreeAsync(first, kOne), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0U);
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(hooks::cuStreamSynchronize(kOne), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 0U);
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 64 * kMiB);
  EXPECT_EQ(fake().live_objects(), 0);
}

TEST_F(AgentPools, KeepsAsMuchAsTheThresholdSays) {
  set_threshold(64 * kMiB);
  const auto first = allocated(40 * kMiB);
  const auto second = allocated(100 * kMiB);
  hooks::cuMemFreeAsync(second, kOne);
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(reserved(), 64 * kMiB);
  hooks::cuMemFreeAsync(first, kOne);
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(hooks::cuMemPoolTrimTo(FakeDriver::default_pool(0), 40 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 64 * kMiB);
  EXPECT_EQ(hooks::cuMemPoolTrimTo(FakeDriver::default_pool(0), 0), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 0U);
}

TEST_F(AgentPools, AStreamThatIsNotDoneKeepsItsMemoryFromOthers) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(40 * kMiB);
  hooks::cuMemFreeAsync(first, kOne);
  EXPECT_EQ(allocated(40 * kMiB, kOne), first) << "its own stream has it at once";
  hooks::cuMemFreeAsync(first, kOne);
  const auto second = allocated(40 * kMiB, kTwo);
  EXPECT_NE(second, first);
  fake().finish(kOne);
  EXPECT_EQ(allocated(40 * kMiB, kTwo), first);
}

TEST_F(AgentPools, AProgramThatForbidsToLookHasItOnlyWhenItHasWaitedItself) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(40 * kMiB);
  int no = 0;
  hooks::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
                               CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &no);
  hooks::cuMemFreeAsync(first, kOne);
  fake().finish(kOne);
  const auto second = allocated(40 * kMiB, kTwo);
  EXPECT_NE(second, first);
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(allocated(40 * kMiB, kTwo), first);
}

TEST_F(AgentPools, AnAnswerThatIsNoneFreesNothing) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(40 * kMiB);
  hooks::cuMemFreeAsync(first, kOne);
  fake().query_result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  EXPECT_NE(allocated(40 * kMiB, kTwo), first);
  hooks::cuStreamSynchronize(kTwo);
  EXPECT_NE(allocated(40 * kMiB, kTwo), first);
  // A context that is gone was waited for.
  fake().query_result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
  EXPECT_EQ(allocated(40 * kMiB, kTwo), first);
}

TEST_F(AgentPools, NoStreamIsAskedWhileAnyIsCaptured) {
  const auto first = allocated(40 * kMiB);
  hooks::cuMemFreeAsync(first, kOne);
  EXPECT_EQ(hooks::cuStreamBeginCapture_v2(kTwo, 0), CUDA_SUCCESS);
  const auto asked = fake().calls["cuEventQuery"];
  hooks::cuStreamSynchronize(kOne);
  allocated(40 * kMiB, reinterpret_cast<CUstream>(0x300));
  EXPECT_EQ(fake().calls["cuEventQuery"], asked);
  EXPECT_EQ(hooks::cuStreamEndCapture(kTwo, nullptr), CUDA_SUCCESS);
}

TEST_F(AgentPools, AStreamWaitsForAllThatTwoThreadsHaveFreed) {
  set_threshold(UINT64_MAX);
  fake().capacity = 32 * kMiB;
  const auto first = allocated(10 * kMiB);
  const auto second = allocated(20 * kMiB);
  // Another thread frees in the same stream, and is done first, though it was told later.
  fake().within("cuEventRecord", [&] { hooks::cuMemFreeAsync(second, kOne); });
  hooks::cuMemFreeAsync(first, kOne);
  EXPECT_EQ(allocated(30 * kMiB, kTwo), first);
  EXPECT_EQ(fake().waits.size(), 2U);
}

TEST_F(AgentPools, AStreamDoesNotWaitForNothing) {
  set_threshold(UINT64_MAX);
  fake().capacity = 64 * kMiB;
  hooks::cuMemFreeAsync(allocated(40 * kMiB), kOne);
  CUdeviceptr address = 0;
  hooks::cuMemAllocAsync(&address, 100 * kMiB, kTwo);
  EXPECT_TRUE(fake().waits.empty()) << "for what would not be enough";
  // Nor for streams that have freed nothing of this pool.
  CUdeviceptr plain = 0;
  fake().capacity = SIZE_MAX;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&plain, 8 * kMiB), CUDA_SUCCESS);
  hooks::cuMemFreeAsync(plain, reinterpret_cast<CUstream>(0x300));
  fake().capacity = 64 * kMiB;
  hooks::cuMemAllocAsync(&address, 40 * kMiB, kTwo);
  EXPECT_EQ(fake().waits.size(), 1U);
}

TEST_F(AgentPools, MoreThanThereIsTakesNothing) {
  fake().capacity = std::size_t{80} << 30;
  CUdeviceptr address = 0;
  hooks::cuMemAllocAsync(&address, std::size_t{200} << 30, kOne);
  EXPECT_FALSE(in_pool(address));
  EXPECT_EQ(fake().calls["cuMemCreate"], 0);
  EXPECT_TRUE(fake().reserved.empty()) << "its addresses stay taken";
}

TEST_F(AgentPools, HasAsManyAddressesAsItNeeds) {
  std::set<CUdeviceptr> found;
  for (int i = 0; i < 6; ++i)
    found.insert(allocated(700 * kMiB));
  EXPECT_EQ(found.size(), 6U);
  EXPECT_GT(fake().reserved.size(), 1U);
  for (const auto address : found) {
    EXPECT_EQ(pool_block_at(address + 699 * kMiB)->address, address);
    hooks::cuMemFreeAsync(address, kOne);
  }
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(fake().live_objects(), 0);
}

TEST_F(AgentPools, WhatAStreamHasComePastIsThereOnAFullGpu) {
  set_threshold(UINT64_MAX);
  int no = 0;
  hooks::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
                               CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &no);
  fake().capacity = 32 * kMiB;
  const auto first = allocated(30 * kMiB);
  hooks::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
                               CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &no);
  hooks::cuMemFreeAsync(first, kOne);
  fake().finish(kOne);
  finish_frees();
  EXPECT_EQ(allocated(30 * kMiB, kTwo), first);
  EXPECT_TRUE(fake().waits.empty());
}

TEST_F(AgentPools, AGreenContextIsNeverMadeCurrent) {
  CUgreenCtx green = nullptr;
  EXPECT_EQ(hooks::cuGreenCtxCreate(&green, nullptr, 0, 0), CUDA_SUCCESS);
  fake().stream_contexts[kTwo] = reinterpret_cast<CUcontext>(green);
  const auto pooled = allocated(kMiB, kOne);
  CUdeviceptr plain = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&plain, 8 * kMiB), CUDA_SUCCESS);
  fake().calls.clear();
  CUdeviceptr in_green = 0;
  EXPECT_EQ(hooks::cuMemAllocAsync(&in_green, kMiB, kTwo), CUDA_SUCCESS);
  EXPECT_FALSE(in_pool(in_green));
  EXPECT_EQ(hooks::cuMemFreeAsync(pooled, kTwo), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFreeAsync(plain, kTwo), CUDA_SUCCESS);
  EXPECT_EQ(fake().calls["cuEventRecord"], 0);
  EXPECT_EQ(fake().calls["cuStreamSynchronize"], 2);
  EXPECT_FALSE(pool_block_at(pooled));
}

TEST_F(AgentPools, AFullGpuMakesStreamsWaitForEachOther) {
  set_threshold(UINT64_MAX);
  const auto first = allocated(30 * kMiB);
  hooks::cuMemFreeAsync(first, kOne);
  // No more memory, and the first stream is not done.
  fake().fail_at("cuMemCreate", 1);
  EXPECT_EQ(allocated(30 * kMiB, kTwo), first);
  ASSERT_EQ(fake().waits.size(), 1U);
  EXPECT_EQ(fake().waits[0].first, kTwo);
  EXPECT_EQ(fake().events[fake().waits[0].second].stream, kOne);
}

TEST_F(AgentPools, OtherMemoryGetsWhatAPoolOnlyKeeps) {
  set_threshold(UINT64_MAX);
  hooks::cuMemFreeAsync(allocated(60 * kMiB), kOne);
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(reserved(), 64 * kMiB);
  fake().fail_at("cuMemCreate", 1);
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&address, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(fake().calls["cuMemAlloc"], 0) << "the driver was asked";
  EXPECT_EQ(reserved(), 0U);
}

TEST_F(AgentPools, SoDoesWhatTheDriverAllocatesItself) {
  set_threshold(UINT64_MAX);
  CUcontext other = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&other, 0, 1), CUDA_SUCCESS);
  CUdeviceptr on_other = 0;
  EXPECT_EQ(hooks::cuMemAllocFromPoolAsync(&on_other, kMiB, FakeDriver::default_pool(1), kTwo),
            CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFreeAsync(on_other, kTwo), CUDA_SUCCESS);
  hooks::cuStreamSynchronize(kTwo);
  std::uint64_t keep = UINT64_MAX;
  hooks::cuMemPoolSetAttribute(FakeDriver::default_pool(1), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                               &keep);
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent_v2(&popped);
  for (const bool pitched : {false, true}) {
    hooks::cuMemFreeAsync(allocated(60 * kMiB), kOne);
    hooks::cuStreamSynchronize(kOne);
    fake().fail_at("cuMemCreate", 1);
    CUdeviceptr address = 0;
    std::size_t pitch = 0;
    EXPECT_EQ(pitched ? hooks::cuMemAllocPitch_v2(&address, &pitch, 100, 4090, 4)
                      : hooks::cuMemAlloc_v2(&address, 4096),
              CUDA_SUCCESS);
    EXPECT_EQ(reserved(), 0U);
  }
  hooks::cuMemFreeAsync(allocated(60 * kMiB), kOne);
  hooks::cuStreamSynchronize(kOne);
  fake().fail_at("cuMemCreate", 1);
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(hooks::cuMemCreate(&handle, 8 * kMiB, &prop, 0), CUDA_SUCCESS);
  EXPECT_EQ(reserved(), 0U);
}

TEST_F(AgentPools, AFailureInTheMiddleOfGrowingLeavesNothing) {
  int no = 0;
  hooks::cuMemPoolSetAttribute(FakeDriver::default_pool(0),
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
      hooks::cuMemFreeAsync(address, kOne);
    }
  }
}

TEST_F(AgentPools, LeavesWithTheProgramAndComesBackWhereItWas) {
  const auto first = allocated(40 * kMiB);
  allocated(5 * kMiB, kTwo);
  hooks::cuMemFreeAsync(first, kOne);
  const auto maps = fake().maps.size();
  const auto inventory = take_inventory();
  EXPECT_EQ(inventory.bytes, 64 * kMiB);
  EXPECT_EQ(inventory.staying, 0U);
  ASSERT_TRUE(evict_all().ok());
  EXPECT_EQ(fake().live_objects(), 0);
  ASSERT_TRUE(repopulate_all().ok());
  EXPECT_EQ(fake().maps.size(), maps);
  EXPECT_EQ(allocated(40 * kMiB, kOne), first);
}

TEST_F(AgentPools, MemoryOfCuMemAllocIsFreedWhenTheStreamGetsThere) {
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&address, 8 * kMiB), CUDA_SUCCESS);
  // Whichever context is current, and it stays so.
  CUcontext second = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&second, 0, 1), CUDA_SUCCESS);
  fake().stream_contexts[kOne] = context_;
  EXPECT_EQ(hooks::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  EXPECT_EQ(fake().current, (std::vector{context_, second}));
  EXPECT_EQ(fake().live_objects(), 1) << "the stream is not there yet";
  EXPECT_EQ(fake().calls["cuMemFree"], 0) << "it waited for all work";
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_ERROR_INVALID_VALUE);
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
}

TEST_F(AgentPools, EachStreamFreesItsOwn) {
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;
  CUdeviceptr third = 0;
  for (auto* address : {&first, &second, &third})
    EXPECT_EQ(hooks::cuMemAlloc_v2(address, 8 * kMiB), CUDA_SUCCESS);
  hooks::cuMemFreeAsync(first, kOne);
  fake().finish(kOne);
  hooks::cuMemFreeAsync(second, kOne);
  hooks::cuMemFreeAsync(third, kTwo);
  finish_frees();
  EXPECT_EQ(fake().live_objects(), 2);
  fake().finish(kTwo);
  finish_frees();
  EXPECT_EQ(fake().live_objects(), 1);
  // A full GPU gets what streams have come past.
  fake().finish(kOne);
  fake().capacity = 8 * kMiB;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&first, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(fake().calls["cuMemAlloc"], 0) << "the driver was asked";
}

TEST_F(AgentPools, AFreeThatCannotBeMarkedLeavesTheMemory) {
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&address, 8 * kMiB), CUDA_SUCCESS);
  const auto pooled = allocated(kMiB);
  for (const auto* call : {"cuEventCreate", "cuEventRecord"}) {
    for (const auto memory : {address, pooled}) {
      fake().fail_at(call, 1);
      EXPECT_NE(hooks::cuMemFreeAsync(memory, kOne), CUDA_SUCCESS) << call;
    }
  }
  EXPECT_EQ(hooks::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFreeAsync(pooled, kOne), CUDA_SUCCESS);
}

TEST_F(AgentPools, AContextThatEndsHasDoneAllItsWork) {
  set_threshold(UINT64_MAX);
  CUcontext second = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
  fake().stream_contexts[kTwo] = second;
  const auto first = allocated(40 * kMiB, kTwo);
  const auto kept = allocated(kMiB, kTwo);
  hooks::cuMemFreeAsync(first, kTwo);
  CUdeviceptr plain = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&plain, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFreeAsync(plain, kTwo), CUDA_SUCCESS);
  const auto objects = fake().live_objects();
  EXPECT_EQ(hooks::cuCtxDestroy_v2(second), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), objects - 1);
  EXPECT_EQ(allocated(40 * kMiB, kOne), first);
  // Memory of a pool is no context's.
  EXPECT_TRUE(pool_block_at(kept));
  EXPECT_EQ(hooks::cuMemFreeAsync(kept, kOne), CUDA_SUCCESS);
}

TEST_F(AgentPools, APoolThatIsDestroyedGoesWithTheLastOfIt) {
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemoryPool pool = nullptr;
  EXPECT_EQ(hooks::cuMemPoolCreate(&pool, &props), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuMemAllocFromPoolAsync(&address, 5 * kMiB, pool, kOne), CUDA_SUCCESS);
  EXPECT_EQ(pool_block_at(address)->pool, pool);
  EXPECT_EQ(hooks::cuMemPoolDestroy(pool), CUDA_SUCCESS);
  EXPECT_TRUE(pool_block_at(address));
  hooks::cuMemFreeAsync(address, kOne);
  EXPECT_FALSE(fake().reserved.empty());
  hooks::cuStreamSynchronize(kOne);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
  EXPECT_FALSE(in_pool(address));
}

TEST_F(AgentPools, WhatADestroyedPoolKeptIsGivenBackAtOnce) {
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUmemoryPool pool = nullptr;
  EXPECT_EQ(hooks::cuMemPoolCreate(&pool, &props), CUDA_SUCCESS);
  std::uint64_t keep = UINT64_MAX;
  hooks::cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
  CUdeviceptr kept = 0;
  CUdeviceptr freed = 0;
  EXPECT_EQ(hooks::cuMemAllocFromPoolAsync(&kept, 5 * kMiB, pool, kOne), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemAllocFromPoolAsync(&freed, 90 * kMiB, pool, kOne), CUDA_SUCCESS);
  hooks::cuMemFreeAsync(freed, kOne);
  hooks::cuStreamSynchronize(kOne);
  const auto before = fake().live_objects();
  EXPECT_EQ(hooks::cuMemPoolDestroy(pool), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 1);
  EXPECT_GT(before, 1);
  EXPECT_TRUE(pool_block_at(kept));
}

TEST_F(AgentPools, ADevicesOwnPoolStaysWhileItsEndIsRefused) {
  const auto first = allocated(kMiB);
  // The driver refuses, and another thread allocates meanwhile.
  CUdeviceptr second = 0;
  fake().within("cuMemPoolDestroy", [&] { second = allocated(kMiB); });
  fake().fail_at("cuMemPoolDestroy", 1);
  EXPECT_NE(hooks::cuMemPoolDestroy(FakeDriver::default_pool(0)), CUDA_SUCCESS);
  EXPECT_EQ(pool_block_at(first)->pool, FakeDriver::default_pool(0));
  EXPECT_EQ(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 2 * kMiB) << "there are two of it";
  EXPECT_TRUE(in_pool(second));
}

TEST_F(AgentPools, AThreadThatHasWaitedDoesNotWaitForOneThatAllocates) {
  fake().within("cuMemCreate", [] { EXPECT_EQ(hooks::cuStreamSynchronize(kTwo), CUDA_SUCCESS); });
  EXPECT_TRUE(in_pool(allocated(kMiB)));
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
    EXPECT_EQ(hooks::cuMemPoolCreate(&pool, &props), CUDA_SUCCESS);
    CUdeviceptr address = 0;
    EXPECT_EQ(hooks::cuMemAllocFromPoolAsync(&address, 5 * kMiB, pool, kOne), CUDA_SUCCESS);
    EXPECT_FALSE(in_pool(address));
    EXPECT_EQ(hooks::cuMemFreeAsync(address, kOne), CUDA_SUCCESS);
  }
  EXPECT_EQ(fake().calls["cuMemAllocFromPoolAsync"], 2);
}

TEST_F(AgentPools, OtherDevicesGetTheRightsThatThePoolGives) {
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const auto first = allocated(kMiB);
  fake().rights.clear();
  EXPECT_EQ(hooks::cuMemPoolSetAccess(FakeDriver::default_pool(0), &right, 1), CUDA_SUCCESS);
  ASSERT_EQ(fake().rights.size(), 1U);
  EXPECT_EQ(fake().rights[0].second.location.id, 1);
  allocated(40 * kMiB);
  EXPECT_EQ(fake().rights.size(), 3U) << "what comes later has them too";
  fake().rights.clear();
  (void)take_inventory();
  ASSERT_TRUE(evict_all().ok());
  ASSERT_TRUE(repopulate_all().ok());
  std::set<int> devices;
  for (const auto& [address, given] : fake().rights)
    if (address == first) devices.insert(given.location.id);
  EXPECT_EQ(devices, (std::set<int>{0, 1})) << "after it has been away";
}

TEST_F(AgentPools, RightsThatWereGivenBeforeThereWasAnyMemoryCount) {
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT_EQ(hooks::cuMemPoolSetAccess(FakeDriver::default_pool(1), &right, 1), CUDA_SUCCESS);
  CUcontext other = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&other, 0, 1), CUDA_SUCCESS);
  fake().rights.clear();
  const auto address = allocated(kMiB, kTwo);
  EXPECT_TRUE(in_pool(address));
  std::set<int> devices;
  for (const auto& [at, given] : fake().rights)
    devices.insert(given.location.id);
  EXPECT_EQ(devices, (std::set<int>{0, 1}));
}

TEST_F(AgentPools, AForkInTheMiddleOfAnAllocationWaitsForNothing) {
  fake().within("cuMemCreate", [] {
    lock_memory_for_fork();
    unlock_memory_after_fork();
  });
  EXPECT_TRUE(in_pool(allocated(kMiB)));
  // In the child, in a handler that has interrupted it.
  fake().within("cuMemCreate", [] {
    lock_memory_for_fork();
    forget_memory_after_fork();
    unlock_memory_after_fork();
  });
  allocated(40 * kMiB);
}

TEST_F(AgentPools, WhatACaptureAllocatesIsTheDriversAndItFreesNothingOfOurs) {
  const auto before = allocated(kMiB);
  EXPECT_EQ(hooks::cuStreamBeginCapture_v2(kTwo, 0), CUDA_SUCCESS);
  fake().captured.insert(kTwo);
  CUdeviceptr node = 0;
  EXPECT_EQ(hooks::cuMemAllocAsync(&node, kMiB, kTwo), CUDA_SUCCESS);
  EXPECT_FALSE(in_pool(node));
  EXPECT_EQ(fake().calls["cuMemAllocAsync"], 1);
  EXPECT_EQ(hooks::cuMemFreeAsync(before, kTwo), CUDA_ERROR_INVALID_VALUE);
  // Beside it the driver says whether one may, and it spoils the capture as it does.
  fake().fail_at("cuMemPoolGetAttribute", 1);
  EXPECT_NE(hooks::cuMemAllocAsync(&node, kMiB, kOne), CUDA_SUCCESS);
  fake().fail_at("cuMemPoolGetAttribute", 1);
  EXPECT_NE(hooks::cuMemFreeAsync(before, kOne), CUDA_SUCCESS);
  fake().fail_at("cuMemPoolGetAttribute", 1);
  EXPECT_NE(hooks::cuMemFree_v2(before), CUDA_SUCCESS);
  fake().captured.clear();
  EXPECT_EQ(hooks::cuStreamEndCapture(kTwo, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFree_v2(before), CUDA_SUCCESS);
}

TEST_F(AgentPools, TheProgramMayNotMapOrUnmapAPoolsMemory) {
  const auto address = allocated(5 * kMiB);
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ};
  EXPECT_EQ(hooks::cuMemUnmap(address, 2 * kMiB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(hooks::cuMemSetAccess(address, 2 * kMiB, &right, 1), CUDA_ERROR_INVALID_VALUE);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(hooks::cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(AgentPools, AProgramThatNeverWaitsLeavesFewMarks) {
  set_threshold(UINT64_MAX);
  for (int i = 0; i < 1000; ++i) {
    hooks::cuMemFreeAsync(allocated(kMiB), kOne);
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
