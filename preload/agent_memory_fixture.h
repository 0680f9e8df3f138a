// The agent's tables on a driver that sees everything, for the tests of its memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "eviction.h"
#include "eviction_internal.h"
#include "fake_driver.h"
#include "sharing.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

class AgentMemory : public ::testing::Test {
 public:
  AgentMemory() {
    forget_everything();
    EXPECT_EQ(hooks::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  }
  ~AgentMemory() override {
    // The driver may take its time, and the program's other threads must not wait for it.
    EXPECT_EQ(fake().called_with_lock, std::set<std::string>{});
  }

 protected:
  static CUdeviceptr allocated(std::size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_EQ(hooks::cuMemAlloc_v2(&address, bytes), CUDA_SUCCESS);
    return address;
  }
  static std::ptrdiff_t shared_as(direct::ShareRole role) {
    const auto all = list_shared();
    return std::count_if(all.begin(), all.end(),
                         [&](const Shared& one) { return one.role == role; });
  }
  static CUmemGenericAllocationHandle created(std::size_t bytes, CUdevice device = 0) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(hooks::cuMemCreate(&handle, bytes, &prop, 0), CUDA_SUCCESS);
    return handle;
  }
  static CUdeviceptr reserved(std::size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_EQ(driver().cuMemAddressReserve(&address, bytes, 0, 0, 0), CUDA_SUCCESS);
    return address;
  }
  static CUresult give(CUdeviceptr address, std::size_t size, CUmemAccess_flags flags,
                       CUdevice device = 0) {
    const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
    return hooks::cuMemSetAccess(address, size, &right, 1);
  }
  // The second half of 8 MiB at `at`, and all of it 8 MiB further on.
  static void map_in_two_places(CUmemGenericAllocationHandle handle, CUdeviceptr at) {
    EXPECT_EQ(hooks::cuMemMap(at, 4 * kMiB, 4 * kMiB, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(hooks::cuMemMap(at + 8 * kMiB, 8 * kMiB, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(give(at, 4 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  }
  // Out and in again. What is mapped where must be as it was, in new memory; returns it.
  static void cycle() {
    const auto shape = [] {
      std::vector<std::array<std::uint64_t, 3>> all;
      for (const auto& [address, map] : fake().maps)
        all.push_back({address, map.size, map.offset});
      return all;
    };
    const auto before = shape();
    const auto objects = fake().live_objects();
    (void)take_inventory();
    ASSERT_TRUE(evict_all().ok());
    EXPECT_TRUE(fake().maps.empty());
    EXPECT_EQ(fake().live_objects(), 0) << "memory was not given back";
    fake().rights.clear();
    ASSERT_TRUE(repopulate_all().ok());
    EXPECT_EQ(shape(), before);
    EXPECT_EQ(fake().live_objects(), objects);
  }

  CUcontext context_ = nullptr;
};

}  // namespace stasis::preload
