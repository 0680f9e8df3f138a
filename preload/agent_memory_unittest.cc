// What the agent knows of the program's memory, and how it takes it away and brings it back, on a
// driver that sees everything.
// Long because one fake driver and one set of helpers serve all cases about memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "agent_memory_fixture.h"
#include "local_memory.h"

namespace stasis::preload {
namespace {

TEST_F(AgentMemory, TheHostsIsNotSavedWithoutRoom) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(hooks::cuMemCreate(&handle, 8 * kMiB, &prop, 0), CUDA_SUCCESS);
  std::uint64_t room = 4 * kMiB;
  EXPECT_EQ(detach_all(room).result, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(detached_count(), 0);
  EXPECT_EQ(hooks::cuMemRelease(handle), CUDA_SUCCESS);
}

TEST_F(AgentMemory, FreeingLeavesNothing) {
  const auto first = allocated(5 * kMiB);
  const auto second = allocated(2 * kMiB);
  EXPECT_EQ(movable_bytes(), 8 * kMiB);
  cycle();
  EXPECT_EQ(hooks::cuMemFree_v2(first), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFree_v2(second), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFree_v2(second), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
  EXPECT_EQ(movable_bytes(), 0);
}

// As with the driver's own cuMemFree: nothing on the device uses the memory any more, whichever
// context the thread that frees it has.
TEST_F(AgentMemory, FreeingWaitsForWorkInFlightBeforeTheMemoryGoes) {
  CUcontext second = nullptr;
  ASSERT_EQ(hooks::cuCtxCreate_v2(&second, 0, 1), CUDA_SUCCESS);
  for (const auto& current :
       {std::vector{context_}, std::vector{second}, std::vector<CUcontext>{}}) {
    fake().current = {context_};
    const auto address = allocated(4 * kMiB);
    fake().current = current;
    bool waited = false;
    fake().within("cuMemFree", [&] {
      EXPECT_TRUE(fake().maps.contains(address));
      waited = true;
    });
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
    EXPECT_TRUE(waited);
    EXPECT_EQ(fake().current, current);
    EXPECT_EQ(fake().live_objects(), 0);
  }
  // What the driver refuses, as it does during a capture, is not done.
  fake().current = {context_};
  const auto address = allocated(4 * kMiB);
  fake().fail_at("cuMemFree", 1);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(fake().live_objects(), 1);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().own_allocations.empty()) << "nothing was lost by the refusal";
  EXPECT_EQ(fake().calls["cuCtxSynchronize"], 0) << "captures of other threads are spoiled by it";
}

// It would wait for work in flight, which may wait for this thread.
TEST_F(AgentMemory, NothingIsFreedToAllocate) {
  const auto frees = fake().calls["cuMemFree"];
  CUdeviceptr address = 0;
  std::size_t pitch = 0;
  for (const std::size_t width : {1U, 512U, 513U, 5000U}) {
    EXPECT_EQ(hooks::cuMemAllocPitch_v2(&address, &pitch, width, 1024, 4), CUDA_SUCCESS);
    EXPECT_EQ(pitch, (width + 511) / 512 * 512);
  }
  EXPECT_EQ(fake().own_allocations.size(), 2U) << "what it was asked with, and a block, stay";
  fake().fail_at("cuMemCreate", 1);
  (void)allocated(4 * kMiB);
  EXPECT_EQ(fake().calls["cuMemFree"], frees);
}

// Other devices read and write it as they do the driver's own; where that cannot be had, the driver
// refuses who asks for it.
TEST_F(AgentMemory, MemoryIsOpenToRdmaWhereTheDeviceHasIt) {
  // The agent asks each device once.
  constexpr CUdevice kWith = 100;
  constexpr CUdevice kWithout = 101;
  fake().without_rdma = {kWithout};
  for (const auto device : {kWith, kWithout}) {
    ASSERT_EQ(hooks::cuCtxCreate_v2(&context_, 0, device), CUDA_SUCCESS);
    (void)allocated(4 * kMiB);
  }
  cycle();  // in new memory
  std::vector<std::pair<CUdevice, int>> all;
  for (const auto& prop : fake().created)
    all.emplace_back(prop.location.id, prop.allocFlags.gpuDirectRDMACapable);
  std::sort(all.begin(), all.end());
  const decltype(all) twice{{kWith, 1}, {kWith, 1}, {kWithout, 0}, {kWithout, 0}};
  EXPECT_EQ(all, twice);
}

// The GPU's own unit decompresses into it as into the driver's own, where the driver knows of that.
TEST_F(AgentMemory, MemoryIsOpenToDecompressionWhereTheDriverTakesIt) {
  constexpr CUdevice kWith = 102;
  constexpr CUdevice kWithout = 103;
  fake().without_decompression = {kWithout};
  for (const auto device : {kWith, kWithout}) {
    ASSERT_EQ(hooks::cuCtxCreate_v2(&context_, 0, device), CUDA_SUCCESS);
    (void)allocated(4 * kMiB);
  }
  cycle();  // in new memory
  std::vector<std::pair<CUdevice, int>> all;
  for (const auto& prop : fake().created)
    all.emplace_back(prop.location.id, prop.allocFlags.usage);
  std::sort(all.begin(), all.end());
  const decltype(all) twice{{kWith, 2}, {kWith, 2}, {kWithout, 0}, {kWithout, 0}};
  EXPECT_EQ(all, twice);
  // A device that has no room is no reason to stop asking.
  fake().created.clear();
  ASSERT_EQ(hooks::cuCtxCreate_v2(&context_, 0, kWith), CUDA_SUCCESS);
  fake().fail_at("cuMemCreate", 1);
  CUdeviceptr of_driver = 0;
  EXPECT_EQ(hooks::cuMemAlloc_v2(&of_driver, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_TRUE(fake().created.empty());
  (void)allocated(4 * kMiB);
  EXPECT_EQ(fake().created.back().allocFlags.usage, 2);
}

TEST_F(AgentMemory, WhatIsADmaBufStaysAndWhatIsRefusedDoesNot) {
  ASSERT_EQ(hooks::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  const auto address = allocated(4 * kMiB);
  int fd = -1;
  fake().fail_at("cuMemGetHandleForAddressRange", 1);
  EXPECT_NE(hooks::cuMemGetHandleForAddressRange(&fd, address, 4 * kMiB, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 4 * kMiB);
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 0);
  EXPECT_EQ(hooks::cuMemGetHandleForAddressRange(&fd, address, 4 * kMiB, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 0U);
}

// No device is told where it has gone: the tool refuses that.
TEST_F(AgentMemory, WhatDevicesAndOtherHostsHaveIsToldUntilItIsFreed) {
  ASSERT_EQ(hooks::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  const auto address = allocated(4 * kMiB);
  fake().fail_at("cuMemCreate", 1);
  const auto of_driver = allocated(4 * kMiB);
  int fd = -1;
  for (const auto one : {address, of_driver, of_driver}) {
    EXPECT_EQ(hooks::cuMemGetHandleForAddressRange(&fd, one, kMiB, 1, 0), CUDA_SUCCESS);
  }
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 2);
  std::uint32_t count = 0;
  count_shared(count);
  EXPECT_EQ(count, 2U);
  fake().fail_at("cuMemFree", 1);
  EXPECT_NE(hooks::cuMemFree_v2(of_driver), CUDA_SUCCESS);
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 2);
  EXPECT_EQ(hooks::cuMemFree_v2(of_driver), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 0);

  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(hooks::cuMemCreate(&handle, 4 * kMiB, &prop, 0), CUDA_SUCCESS);
  char fabric[64] = {};
  fake().fail_at("cuMemExportToShareableHandle", 1);
  EXPECT_NE(hooks::cuMemExportToShareableHandle(fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0),
            CUDA_SUCCESS);
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 0);
  EXPECT_EQ(hooks::cuMemExportToShareableHandle(fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0),
            CUDA_SUCCESS);
  EXPECT_EQ(shared_as(direct::ShareRole::kOutside), 1);
}

// As it does of virtual memory from which P2P tokens were asked, and then reads what the context
// has.
TEST_F(AgentMemory, WhatIsSynchronousIsWhatTheProgramSaidAlsoWhereTheDriverTakesIt) {
  ASSERT_EQ(hooks::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  const auto address = allocated(4 * kMiB);
  for (const unsigned wanted : {1U, 0U, 1U}) {
    ASSERT_EQ(hooks::cuPointerSetAttribute(&wanted, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address),
              CUDA_SUCCESS);
    unsigned char found[sizeof(CUcontext)] = {};
    ASSERT_EQ(hooks::cuPointerGetAttribute(found, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address),
              CUDA_SUCCESS);
    EXPECT_EQ(found[0], wanted);
  }
}

// The driver would save it, and there is much of it.
TEST_F(AgentMemory, LocalMemoryGoesAndComesBackAsItWas) {
  CUcontext second = nullptr;
  ASSERT_EQ(hooks::cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
  fake().stack_sizes = {{context_, 8192}, {second, 512}};
  const auto wanted = fake().stack_sizes;
  const auto current = fake().current;
  (void)allocated(4 * kMiB);
  (void)take_inventory();
  ASSERT_TRUE(evict_all().ok());
  release_local_memory();
  EXPECT_EQ(fake().stack_sizes[context_], 0);
  EXPECT_EQ(fake().stack_sizes[second], 0);
  // No room for it: then for nothing.
  for (const int nth : {1, 2}) {
    fake().fail_at("cuCtxSetLimit", nth);
    EXPECT_EQ(repopulate_all().result, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_TRUE(fake().maps.empty());
    EXPECT_EQ(fake().live_objects(), 0);
    EXPECT_EQ(fake().stack_sizes[context_], 0);
    EXPECT_EQ(fake().stack_sizes[second], 0);
  }
  EXPECT_TRUE(repopulate_all().ok());
  EXPECT_EQ(fake().stack_sizes, wanted);
  EXPECT_EQ(fake().current, current);
}

TEST_F(AgentMemory, LocalMemoryThatTheDriverDoesNotGiveBackStays) {
  for (const char* call : {"cuCtxGetLimit", "cuCtxSetLimit"}) {
    (void)take_inventory();
    fake().fail_at(call, 1);
    EXPECT_TRUE(evict_all().ok()) << call;
    release_local_memory();
    EXPECT_TRUE(repopulate_all().ok()) << call;
    (void)fake().stack_size();
    EXPECT_EQ(fake().stack_sizes[context_], 1024) << call;
  }
}

TEST_F(AgentMemory, ForeignThingsAreTheDrivers) {
  EXPECT_EQ(hooks::cuMemFree_v2(12345), CUDA_ERROR_INVALID_VALUE);
  const auto large = allocated(4 * kMiB);
  EXPECT_EQ(hooks::cuMemFree_v2(large + 2 * kMiB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(fake().live_objects(), 1);
}

TEST_F(AgentMemory, TheDriverAnswersWhereThereIsNoRoom) {
  for (const char* call : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    fake().fail_at(call, 1);
    const auto address = allocated(4 * kMiB);
    EXPECT_TRUE(fake().own_allocations.contains(address)) << call;
    EXPECT_EQ(fake().live_objects(), 0) << call;
    EXPECT_TRUE(fake().reserved.empty()) << call;
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
    fake().fail_at(call, 1);
    const auto small = allocated(kMiB);
    EXPECT_TRUE(fake().own_allocations.contains(small)) << call;
    EXPECT_EQ(fake().live_objects(), 0) << call;
    EXPECT_TRUE(fake().reserved.empty()) << call;
    EXPECT_EQ(hooks::cuMemFree_v2(small), CUDA_SUCCESS);
  }
}

TEST_F(AgentMemory, AProgramMayNotUnmapWhatItAllocated) {
  const auto address = allocated(4 * kMiB);
  EXPECT_EQ(hooks::cuMemUnmap(address, 4 * kMiB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(hooks::cuMemUnmap(address - 2 * kMiB, 4 * kMiB), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(give(address + 2 * kMiB, 2 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READ),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(fake().maps.size(), 1U);
}

TEST_F(AgentMemory, PiecesOfOneMemoryInSeveralPlaces) {
  const auto at = reserved(16 * kMiB);
  const auto handle = created(8 * kMiB);
  map_in_two_places(handle, at);
  EXPECT_EQ(take_inventory().segments.size(), 1U);
  cycle();
  // Given up while mapped: it lives as long as a mapping does, and goes with the last.
  EXPECT_EQ(hooks::cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemMap(at + 4 * kMiB, 2 * kMiB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE)
      << "a handle that was given up still works";
  EXPECT_EQ(hooks::cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
  cycle();
  EXPECT_EQ(hooks::cuMemUnmap(at, 4 * kMiB), CUDA_SUCCESS);
  cycle();
  EXPECT_EQ(hooks::cuMemUnmap(at + 8 * kMiB, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_EQ(movable_bytes(), 0);
}

TEST_F(AgentMemory, WhatIsGivenOutNoMoreIsReplaced) {
  const auto at = reserved(16 * kMiB);
  const auto handle = created(8 * kMiB);
  map_in_two_places(handle, at);
  EXPECT_EQ(give(at + 8 * kMiB, 8 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_SUCCESS);
  (void)take_inventory();
  const auto before = fake().maps;
  const auto old = before.at(at).handle;
  fake().unexportable = {old};
  int fd = -1;
  // By whatever it fails, all is as it was: two windows to copy by, then the program's own
  // mappings.
  const std::vector<std::pair<const char*, int>> steps = {{"cuMemCreate", 1},
                                                          {"cuMemAddressReserve", 1},
                                                          {"cuMemAddressReserve", 2},
                                                          {"cuMemMap", 1},
                                                          {"cuMemMap", 2},
                                                          {"cuMemMap", 3},
                                                          {"cuMemMap", 4},
                                                          {"cuMemSetAccess", 1},
                                                          {"cuMemSetAccess", 2},
                                                          {"cuMemSetAccess", 3},
                                                          {"cuMemSetAccess", 4},
                                                          {"cuMemcpyDtoD", 1}};
  for (const auto& [call, nth] : steps) {
    fake().fail_at(call, nth);
    EXPECT_EQ(export_segment(0, fd).result, CUDA_ERROR_INVALID_VALUE) << call << " " << nth;
    EXPECT_TRUE(fake().failures.empty()) << call << " " << nth << " was not called";
    fake().failures.clear();
    EXPECT_EQ(fake().live_objects(), 1) << call << " " << nth;
    ASSERT_EQ(fake().maps.size(), 2U) << call << " " << nth;
    EXPECT_EQ(fake().maps.at(at).handle, old) << call << " " << nth;
    EXPECT_EQ(fake().maps.at(at + 8 * kMiB).handle, old) << call << " " << nth;
  }
  fake().rights.clear();
  EXPECT_TRUE(export_segment(0, fd).ok());
  EXPECT_EQ(fake().live_objects(), 1);
  ASSERT_EQ(fake().maps.size(), 2U);
  EXPECT_NE(fake().maps.at(at).handle, old);
  EXPECT_EQ(fake().maps.at(at).offset, 4 * kMiB);
  EXPECT_EQ(fake().maps.at(at + 8 * kMiB).handle, fake().maps.at(at).handle);
  // Those of the two windows, and then the program's.
  ASSERT_EQ(fake().rights.size(), 4U);
  EXPECT_EQ(fake().rights[2].first, at);
  EXPECT_EQ(fake().rights[3].first, at + 8 * kMiB);
  EXPECT_EQ(fake().rights[3].second.flags, CU_MEM_ACCESS_FLAGS_PROT_READ);
  cycle();
}

TEST_F(AgentMemory, WhatSticksOutOfAnUnmapStays) {
  const auto at = reserved(8 * kMiB);
  const auto handle = created(8 * kMiB);
  EXPECT_EQ(hooks::cuMemMap(at, 8 * kMiB, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(give(at, 8 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemUnmap(at + 2 * kMiB, 2 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(fake().maps.size(), 2U);
  cycle();
  // Each part with its rights, and no more.
  ASSERT_EQ(fake().rights.size(), 2U);
  EXPECT_EQ(fake().rights[0].first, at);
  EXPECT_EQ(fake().rights[1].first, at + 4 * kMiB);
  EXPECT_EQ(hooks::cuMemUnmap(at, 8 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
}

TEST_F(AgentMemory, RightsThatAreGivenAgainDoNotPileUp) {
  const auto at = reserved(8 * kMiB);
  const auto handle = created(8 * kMiB);
  EXPECT_EQ(hooks::cuMemMap(at, 8 * kMiB, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(give(at, 8 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(give(at + 2 * kMiB, 2 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_SUCCESS);
    EXPECT_EQ(give(at + 2 * kMiB, 2 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  }
  EXPECT_EQ(give(at + 2 * kMiB, 2 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_SUCCESS);
  EXPECT_EQ(give(at, 8 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READ, 1), CUDA_SUCCESS);
  cycle();
  ASSERT_EQ(fake().rights.size(), 3U);
  // The last word on each part comes last.
  EXPECT_EQ(fake().rights[1].first, at + 2 * kMiB);
  EXPECT_EQ(fake().rights[1].second.flags, CU_MEM_ACCESS_FLAGS_PROT_READ);
  EXPECT_EQ(fake().rights[2].second.location.id, 1);
}

TEST_F(AgentMemory, TakingItAgainIsAllOrNothing) {
  std::vector<CUdeviceptr> all;
  for (int i = 0; i < 4; ++i)
    all.push_back(allocated(4 * kMiB));
  (void)take_inventory();
  ASSERT_TRUE(evict_all().ok());
  for (const char* call : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    for (int nth = 1; nth <= 4; ++nth) {
      fake().fail_at(call, nth);
      EXPECT_EQ(repopulate_all().result, CUDA_ERROR_OUT_OF_MEMORY) << call;
      EXPECT_EQ(fake().live_objects(), 0) << call << " " << nth;
      EXPECT_TRUE(fake().maps.empty()) << call << " " << nth;
    }
  }
  EXPECT_TRUE(repopulate_all().ok());
  EXPECT_EQ(fake().maps.size(), 4U);
  for (const auto address : all)
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
}

TEST_F(AgentMemory, WhatWasPinnedIsCopiedWhereItWasAsFarAsItWasThereWhole) {
  const auto whole = allocated(4 * kMiB);
  const auto handle = created(4 * kMiB);
  const auto place = reserved(4 * kMiB);
  // In two halves.
  ASSERT_EQ(hooks::cuMemMap(place, 2 * kMiB, 2 * kMiB, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(hooks::cuMemMap(place + 2 * kMiB, 2 * kMiB, 0, handle, 0), CUDA_SUCCESS);
  (void)take_inventory();
  std::vector<std::byte> buffer(8 * kMiB);
  std::set<CUdeviceptr> at;
  const std::vector<int> pinned{0, 0};
  const auto copied = [&](int reservations) {
    const auto before = fake().calls["cuMemAddressReserve"];
    const auto there = fake().reserved;
    const auto mapped = fake().maps;
    at.clear();
    fake().rights.clear();
    EXPECT_TRUE(copy_pinned(pinned, buffer.data()).ok());
    for (const auto& [address, right] : fake().rights)
      at.insert(address);
    EXPECT_EQ(fake().calls["cuMemAddressReserve"] - before, reservations);
    EXPECT_EQ(fake().reserved, there);
    EXPECT_EQ(fake().maps, mapped);
  };
  // As long as it is there itself, its place is taken.
  copied(2);
  EXPECT_FALSE(at.contains(whole));
  ASSERT_TRUE(evict_all().ok());
  copied(1);
  EXPECT_TRUE(at.contains(whole));
  ASSERT_TRUE(repopulate_all().ok());
  ASSERT_EQ(fake().maps.at(whole).size, 4 * kMiB);
}

// As of programs that spread their memory over GPUs and compute on one.
TEST_F(AgentMemory, WhatIsOnAPeerIsCopiedByAContextOfTheProgram) {
  (void)created(4 * kMiB, 1);
  (void)take_inventory();
  std::vector<std::byte> buffer(4 * kMiB);
  const auto own = fake().contexts.begin()->first;
  fake().current.clear();
  bool copied = false;
  fake().within("cuMemcpyDtoH", [&] {
    EXPECT_EQ(fake().current, std::vector{own});
    copied = true;
  });
  EXPECT_TRUE(copy_all(buffer.data(), true).ok());
  EXPECT_TRUE(copied);
  EXPECT_EQ(fake().calls["cuDevicePrimaryCtxRetain"], 0);
}

TEST_F(AgentMemory, WhatIsOnADeviceWithoutAContextIsCopiedAsWell) {
  (void)created(4 * kMiB, 1);
  (void)created(4 * kMiB, 1);
  (void)take_inventory();
  fake().without_rights = {0};
  fake().contexts[FakeDriver::kPrimary] = 1;
  std::vector<std::byte> buffer(8 * kMiB);
  fake().current.clear();
  const std::vector<int> pinned{0, 0};
  for (const bool there : {true, false}) {
    bool copied = false;
    fake().within("cuMemcpyDtoH", [&] {
      EXPECT_EQ(fake().current, std::vector{FakeDriver::kPrimary});
      EXPECT_EQ(fake().calls["cuDevicePrimaryCtxRetain"], 1);
      copied = true;
    });
    EXPECT_TRUE((there ? copy_all(buffer.data(), true) : copy_pinned(pinned, buffer.data())).ok());
    EXPECT_TRUE(copied);
    EXPECT_EQ(std::exchange(fake().calls["cuDevicePrimaryCtxRetain"], 0), 1);
    EXPECT_EQ(std::exchange(fake().calls["cuDevicePrimaryCtxRelease"], 0), 1);
    EXPECT_TRUE(fake().current.empty());
    if (!there) continue;
    ASSERT_TRUE(evict_all().ok());
  }
  ASSERT_TRUE(repopulate_all().ok());
  // A program that waits for memory has to know that it is what there is none of.
  fake().fail_at("cuDevicePrimaryCtxRetain", 1);
  const auto refused = copy_all(buffer.data(), false);
  EXPECT_EQ(refused.result, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_STREQ(refused.what, "cuDevicePrimaryCtxRetain");
}

TEST_F(AgentMemory, WhatCouldNotLeaveIsThereAgain) {
  for (int i = 0; i < 4; ++i)
    (void)allocated(4 * kMiB);
  for (const char* call : {"cuMemUnmap", "cuMemRelease"}) {
    (void)take_inventory();
    fake().fail_at(call, 3);
    EXPECT_FALSE(evict_all().ok());
    EXPECT_EQ(fake().maps.size(), 4U) << call;
  }
}

// In a process of its own, as exporting starts the thread that lends.
TEST_F(AgentMemory, WhatOthersHaveLeavesAndWhatHardwareHasStays) {
  const auto export_and_empty = [] {
    const auto handle = created(4 * kMiB);
    (void)allocated(2 * kMiB);
    int fd = -1;
    EXPECT_EQ(hooks::cuMemExportToShareableHandle(&fd, handle,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              CUDA_ERROR_INVALID_VALUE)
        << "it was not asked to be exportable";
    EXPECT_EQ(movable_bytes(), 6 * kMiB);
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle shared = 0;
    EXPECT_EQ(hooks::cuMemCreate(&shared, 8 * kMiB, &prop, 0), CUDA_SUCCESS);
    EXPECT_EQ(hooks::cuMemExportToShareableHandle(&fd, shared,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              CUDA_SUCCESS);
    // Hardware has it, where it is.
    CUmemGenericAllocationHandle bound = 0;
    EXPECT_EQ(hooks::cuMemCreate(&bound, 16 * kMiB, &prop, 0), CUDA_SUCCESS);
    EXPECT_EQ(hooks::cuMulticastBindMem(1, 0, bound, 0, 16 * kMiB, 0), CUDA_SUCCESS);
    const auto inventory = take_inventory();
    EXPECT_EQ(inventory.bytes, 14 * kMiB);
    EXPECT_EQ(inventory.staying_bytes, 16 * kMiB);
    ASSERT_TRUE(evict_all().ok());
    EXPECT_EQ(fake().live_objects(), 1);
  };
  EXPECT_EXIT(
      {
        export_and_empty();
        std::_Exit(HasFailure() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(AgentMemory, AContextTakesItsMemoryAndItsCapturesWithIt) {
  CUcontext second = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
  const auto gone = allocated(4 * kMiB);
  EXPECT_EQ(hooks::cuStreamBeginCapture_v2(nullptr, 0), CUDA_SUCCESS);
  EXPECT_EQ(captures_in_progress(), 1);
  EXPECT_EQ(hooks::cuCtxDestroy_v2(second), CUDA_SUCCESS);
  EXPECT_EQ(captures_in_progress(), 0) << "the gate would never close again";
  EXPECT_EQ(movable_bytes(), 0);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(fake().reserved.empty());
  EXPECT_EQ(hooks::cuMemFree_v2(gone), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(known_contexts(), std::vector<CUcontext>{context_});
}

// Who ends it without cuStreamEndCapture: the gate would never close again.
TEST_F(AgentMemory, ACaptureEndsWithItsStreamHoweverThatEnds) {
  auto* const stream = reinterpret_cast<CUstream>(std::uintptr_t{0x50});
  ASSERT_EQ(hooks::cuStreamBeginCapture_v2(stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(hooks::cuStreamDestroy_v2(stream), CUDA_SUCCESS);
  EXPECT_EQ(captures_in_progress(), 0) << "destroyed";

  // Each thread has such a stream of its own.
  ASSERT_EQ(hooks::cuStreamBeginCapture_v2(kStreamPerThread, 0), CUDA_SUCCESS);
  std::thread([] {
    EXPECT_EQ(hooks::cuStreamBeginCapture_v2_ptsz(nullptr, 0), CUDA_SUCCESS);
    EXPECT_EQ(captures_in_progress(), 2);
  }).join();
  EXPECT_EQ(captures_in_progress(), 1) << "the thread has ended";
  ASSERT_EQ(hooks::cuStreamEndCapture(kStreamPerThread, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(captures_in_progress(), 0);

  // Of a context that is not the current one.
  CUcontext second = nullptr;
  ASSERT_EQ(hooks::cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
  fake().stream_contexts[stream] = context_;
  ASSERT_EQ(hooks::cuStreamBeginCapture_v2(stream, 0), CUDA_SUCCESS);
  ASSERT_EQ(hooks::cuCtxDestroy_v2(second), CUDA_SUCCESS);
  EXPECT_EQ(captures_in_progress(), 1);
  ASSERT_EQ(hooks::cuCtxDestroy_v2(context_), CUDA_SUCCESS);
  EXPECT_EQ(captures_in_progress(), 0) << "the stream's context is gone";

  for (const bool with_primary : {false, true}) {
    CUgreenCtx green = nullptr;
    ASSERT_EQ(hooks::cuGreenCtxCreate(&green, nullptr, 0, 0), CUDA_SUCCESS);
    fake().current.push_back(reinterpret_cast<CUcontext>(green));
    ASSERT_EQ(hooks::cuStreamBeginCapture_v2(kStreamPerThread, 0), CUDA_SUCCESS);
    fake().current.pop_back();
    if (with_primary) {
      ASSERT_EQ(hooks::cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
    } else {
      ASSERT_EQ(hooks::cuGreenCtxDestroy(green), CUDA_SUCCESS);
    }
    EXPECT_EQ(captures_in_progress(), 0) << "the green context is gone";
  }
}

// As with the handle of a process without an agent.
TEST_F(AgentMemory, AContextClosesWhatTheDriverHasOpenedInIt) {
  const auto opened_by = [](std::uint64_t number) {
    CUipcMemHandle handle{};
    std::memcpy(handle.reserved, &number, sizeof number);
    CUdeviceptr address = 0;
    EXPECT_EQ(hooks::cuIpcOpenMemHandle_v2(&address, handle, kIpcMemLazyEnablePeerAccess),
              CUDA_SUCCESS);
    return address;
  };
  const auto first = opened_by(1);
  EXPECT_EQ(opened_by(1), first);
  (void)opened_by(2);
  EXPECT_EQ(shared_pieces(), 2U);
  EXPECT_EQ(hooks::cuIpcCloseMemHandle(first), CUDA_SUCCESS);
  EXPECT_EQ(shared_pieces(), 2U);
  EXPECT_EQ(hooks::cuIpcCloseMemHandle(first), CUDA_SUCCESS);
  EXPECT_EQ(shared_pieces(), 1U);
  EXPECT_EQ(fake().opened.size(), 1U);
  ASSERT_EQ(hooks::cuCtxDestroy_v2(context_), CUDA_SUCCESS);
  EXPECT_EQ(shared_pieces(), 0U);
}

TEST_F(AgentMemory, PeersGetRightsWhenever) {
  CUcontext other = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&other, 0, 1), CUDA_SUCCESS);
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent_v2(&popped);
  const auto before = allocated(4 * kMiB);
  // As another thread would, in the middle of an allocation.
  fake().within("cuMemMap", [&] {
    driver().cuCtxPushCurrent_v2(other);
    EXPECT_EQ(hooks::cuCtxEnablePeerAccess(context_, 0), CUDA_SUCCESS);
    driver().cuCtxPopCurrent_v2(&popped);
  });
  const auto during = allocated(4 * kMiB);
  const auto after = allocated(4 * kMiB);
  const auto has_right = [](CUdeviceptr address) {
    return std::any_of(fake().rights.begin(), fake().rights.end(), [&](const auto& right) {
      return right.first == address && right.second.location.id == 1;
    });
  };
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(has_right(before));
    EXPECT_TRUE(has_right(during));
    EXPECT_TRUE(has_right(after));
    cycle();
  }
}

TEST_F(AgentMemory, FreeingInAStreamHoldsNoThreadUp) {
  fake().fail_at("cuMemCreate", 1);
  const auto small = allocated(kMiB);  // the driver's
  const auto large = allocated(4 * kMiB);
  // What the driver waits for may itself need the agent: with a lock held this would never end.
  fake().within("cuMemFreeAsync", [&] { EXPECT_EQ(hooks::cuMemFree_v2(large), CUDA_SUCCESS); });
  EXPECT_EQ(hooks::cuMemFreeAsync(small, nullptr), CUDA_SUCCESS);
}

// Also by the call of before CUDA 3.2: the agent waits for all.
TEST_F(AgentMemory, EveryContextThatIsMadeIsKnown) {
  CUcontext old = nullptr;
  ASSERT_EQ(hooks::cuCtxCreate(&old, 0, 1), CUDA_SUCCESS);
  auto contexts = known_contexts();
  std::sort(contexts.begin(), contexts.end());
  EXPECT_EQ(contexts, (std::vector{context_, old}));
}

TEST_F(AgentMemory, ADetachedContextTakesItsMemoryAlong) {
  (void)allocated(4 * kMiB);
  CUcontext same = nullptr;
  ASSERT_EQ(hooks::cuCtxAttach(&same, 0), CUDA_SUCCESS);
  ASSERT_EQ(hooks::cuCtxDetach(context_), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 4 * kMiB) << "it was attached to";
  fake().contexts[context_] = 0;
  ASSERT_EQ(hooks::cuCtxDetach(context_), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 0U);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(known_contexts().empty());
}

// The primary context is waited for, which it shares its memory and its end with.
TEST_F(AgentMemory, WhatIsAllocatedInAGreenContextIsThePrimarys) {
  const auto allocated_in = [](CUgreenCtx green) {
    fake().current.push_back(reinterpret_cast<CUcontext>(green));
    const auto address = allocated(4 * kMiB);
    fake().current.pop_back();
    return address;
  };
  CUgreenCtx green = nullptr;
  ASSERT_EQ(hooks::cuGreenCtxCreate(&green, nullptr, 0, 0), CUDA_SUCCESS);
  const auto first = allocated_in(green);
  auto contexts = known_contexts();
  std::sort(contexts.begin(), contexts.end());
  EXPECT_EQ(contexts, (std::vector{context_, FakeDriver::kPrimary}));
  ASSERT_EQ(hooks::cuGreenCtxDestroy(green), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 4 * kMiB);
  EXPECT_EQ(hooks::cuMemFree_v2(first), CUDA_SUCCESS);

  ASSERT_EQ(hooks::cuGreenCtxCreate(&green, nullptr, 0, 0), CUDA_SUCCESS);
  (void)allocated_in(green);
  fake().primary_active = 0;
  ASSERT_EQ(hooks::cuGreenCtxDestroy(green), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 0U) << "the primary context ended with it";
  EXPECT_EQ(fake().live_objects(), 0);
}

// What another thread allocates where the driver has given the handle of the ended one away
// already.
TEST_F(AgentMemory, ANewContextKeepsItsMemoryWhileTheEndedOneOfItsHandleIsDropped) {
  const auto old = allocated(4 * kMiB);
  const auto old_small = allocated(512);
  CUdeviceptr fresh = 0;
  CUdeviceptr fresh_small = 0;
  fake().within("cuCtxDestroy", [&] {
    fake().next_handle = reinterpret_cast<std::uintptr_t>(context_) >> 8;
    fake().current.clear();
    CUcontext second = nullptr;
    ASSERT_EQ(hooks::cuCtxCreate_v2(&second, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(second, context_);
    fake().next_handle += 100;
    fresh = allocated(2 * kMiB);
    fresh_small = allocated(512);
  });
  ASSERT_EQ(hooks::cuCtxDestroy_v2(context_), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 4 * kMiB);
  EXPECT_FALSE(fake().maps.contains(old));
  EXPECT_FALSE(fake().maps.contains(old_small));
  EXPECT_TRUE(fake().maps.contains(fresh));
  EXPECT_TRUE(fake().maps.contains(fresh_small));
  EXPECT_EQ(known_contexts(), std::vector{context_});

  fake().contexts[context_] = 0;
  ASSERT_EQ(hooks::cuCtxDestroy_v2(context_), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
  EXPECT_TRUE(known_contexts().empty());
}

TEST_F(AgentMemory, APrimaryContextThatIsRetainedAnewKeepsItsMemoryWhileTheFormerIsDropped) {
  CUcontext primary = nullptr;
  CUdeviceptr fresh = 0;
  fake().contexts[FakeDriver::kPrimary] = 0;
  const auto retain_and_allocate = [&](std::size_t bytes) {
    EXPECT_EQ(hooks::cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
    fake().current = {primary};
    fresh = allocated(bytes);
  };
  // Whether the one that lets it go has seen it inactive in between, or only the new one.
  for (const int active : {0, 1}) {
    for (const bool reset : {false, true}) {
      retain_and_allocate(4 * kMiB);
      const auto old = fresh;
      fake().primary_active = active;
      fake().within(active ? reset ? "cuDevicePrimaryCtxReset" : "cuDevicePrimaryCtxRelease"
                           : "cuDevicePrimaryCtxGetState",
                    [&] {
                      ++fake().primary_id;
                      retain_and_allocate(2 * kMiB);
                    });
      ASSERT_EQ(
          reset ? hooks::cuDevicePrimaryCtxReset_v2(0) : hooks::cuDevicePrimaryCtxRelease_v2(0),
          CUDA_SUCCESS);
      EXPECT_EQ(movable_bytes(), 2 * kMiB) << active << reset;
      EXPECT_FALSE(fake().maps.contains(old)) << active << reset;
      EXPECT_TRUE(fake().maps.contains(fresh)) << active << reset;

      fake().primary_active = 0;
      ASSERT_EQ(hooks::cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
      EXPECT_EQ(fake().live_objects(), 0) << active << reset;
      ++fake().primary_id;
    }
  }
}

// Others have retained it, and go on.
TEST_F(AgentMemory, APrimaryContextThatIsStillRetainedKeepsItsMemory) {
  CUcontext primary = nullptr;
  fake().contexts[FakeDriver::kPrimary] = 0;
  ASSERT_EQ(hooks::cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
  fake().current = {primary};
  (void)allocated(4 * kMiB);
  fake().within("cuDevicePrimaryCtxRelease", [&] {
    ASSERT_EQ(hooks::cuDevicePrimaryCtxRetain(&primary, 0), CUDA_SUCCESS);
    (void)allocated(2 * kMiB);
  });
  ASSERT_EQ(hooks::cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
  EXPECT_EQ(movable_bytes(), 6 * kMiB);
  fake().primary_active = 0;
  ASSERT_EQ(hooks::cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
  EXPECT_EQ(fake().live_objects(), 0);
}

// In a handler of a signal, which has come while its thread was looking something up.
TEST_F(AgentMemory, AForkWhileTheThreadHasTheTablesForgetsThemLater) {
  (void)allocated(4 * kMiB);
  {
    const TablesLock lock;
    lock_memory_for_fork();
    unlock_memory_after_fork();  // of the parent
    EXPECT_EQ(tables().allocations.size(), 1U);
    lock_memory_for_fork();
    unlock_memory_after_fork();
    forget_memory_after_fork();  // of the child
    EXPECT_EQ(tables().allocations.size(), 1U) << "it is still looking";
  }
  EXPECT_TRUE(tables().allocations.empty());
  EXPECT_TRUE(known_contexts().empty());
}

}  // namespace
}  // namespace stasis::preload
