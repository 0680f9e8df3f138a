// How managed memory goes and comes back, where a driver is that can be steered and one that
// cannot.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "eviction.h"
#include "eviction_internal.h"
#include "fake_driver.h"
#include "managed.h"
#include "sharing.h"

namespace stasis::preload {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

constexpr std::size_t kMiB = std::size_t{1} << 20;

class AgentManaged : public ::testing::Test {
 public:
  AgentManaged() {
    forget_everything();
    EXPECT_EQ(hooks::cuCtxCreate_v2(&context_, 0, 0), CUDA_SUCCESS);
  }
  ~AgentManaged() override {
    for (const CUdeviceptr address : given_)
      (void)hooks::cuMemFree_v2(address);
    EXPECT_EQ(fake().called_with_lock, std::set<std::string>{});
  }

 protected:
  CUdeviceptr allocated(std::size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_EQ(hooks::cuMemAllocManaged(&address, bytes, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
    given_.push_back(address);
    return address;
  }
  static unsigned char* bytes_at(CUdeviceptr address) {
    return reinterpret_cast<unsigned char*>(address);
  }
  static void fill(CUdeviceptr address, std::size_t bytes, int value) {
    std::memset(bytes_at(address), value, bytes);
  }
  static bool holds(CUdeviceptr address, std::size_t bytes, int value) {
    return std::all_of(bytes_at(address), bytes_at(address) + bytes,
                       [&](unsigned char byte) { return byte == value; });
  }

  CUcontext context_ = nullptr;
  std::vector<CUdeviceptr> given_;
};

TEST_F(AgentManaged, EachPieceComesBackWhereItWas) {
  const std::vector<std::size_t> sizes{1, 4096, 100000, 3 * kMiB + 5000, 40 * kMiB};
  for (std::size_t i = 0; i < sizes.size(); ++i)
    fill(allocated(sizes[i]), sizes[i], static_cast<int>(i) + 1);
  for (int cycle = 0; cycle < 2; ++cycle) {
    ASSERT_TRUE(save_managed().ok());
    EXPECT_EQ(managed_away(), sizes.size());
    // The driver has none, and the program reads and writes what it would have.
    EXPECT_TRUE(fake().managed.empty());
    for (std::size_t i = 0; i < sizes.size(); ++i)
      EXPECT_TRUE(holds(given_[i], sizes[i], static_cast<int>(i) + 1)) << sizes[i];
    bytes_at(given_[3])[7] = 99;
    ASSERT_TRUE(retake_managed().ok());
    EXPECT_EQ(managed_away(), 0);
    EXPECT_EQ(fake().managed.size(), sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(fake().managed.contains(given_[i]));
      if (i == 3) {
        EXPECT_EQ(bytes_at(given_[i])[7], 99);
        bytes_at(given_[i])[7] = 4;
      }
      EXPECT_TRUE(holds(given_[i], sizes[i], static_cast<int>(i) + 1)) << sizes[i];
    }
  }
}

TEST_F(AgentManaged, WhatWasNeverTouchedTakesNoMemory) {
  const CUdeviceptr address = allocated(64 * kMiB);
  fill(address + 10 * kMiB, kMiB, 5);
  ASSERT_TRUE(save_managed().ok());
  std::vector<unsigned char> resident(64 * kMiB / 4096);
  ASSERT_EQ(::mincore(bytes_at(address), 64 * kMiB, resident.data()), 0);
  EXPECT_LE(std::count(resident.begin(), resident.end(), 1), 2 * kMiB / 4096);
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_TRUE(holds(address + 10 * kMiB, kMiB, 5));
  EXPECT_TRUE(holds(address, 10 * kMiB, 0));
}

TEST_F(AgentManaged, WhatTheProgramHasSaidIsSaidAgain) {
  const CUdeviceptr address = allocated(8 * kMiB);
  auto* stream = reinterpret_cast<CUstream>(0x77);
  auto* gone = reinterpret_cast<CUstream>(0x78);
  fake().stream_contexts[gone] = context_;
  using Advice = FakeDriver::Advice;
  EXPECT_EQ(hooks::cuMemAdvise(address, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemAdvise(address, 8 * kMiB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 0),
            CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemAdvise(address, 8 * kMiB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, kDeviceCpu),
            CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemAdvise(address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 0), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemAdvise(address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 1), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuStreamAttachMemAsync(gone, address, 0, CU_MEM_ATTACH_SINGLE), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuStreamDestroy_v2(gone), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuStreamAttachMemAsync(stream, address, 8 * kMiB, CU_MEM_ATTACH_SINGLE),
            CUDA_SUCCESS);
  fake().advice.clear();
  fake().attached.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().advice,
            (std::vector<Advice>{{address, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0},
                                 {address, 8 * kMiB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, -1},
                                 {address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 0},
                                 {address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 1}}));
  EXPECT_EQ(
      fake().attached,
      (std::vector<FakeDriver::Attached>{{stream, address, kManagedArea, CU_MEM_ATTACH_SINGLE}}));
}

TEST_F(AgentManaged, ManyThreadsCopyAsOneDoes) {
  // For the others of this program, too.
  Copiers::start();
  for (int round = 0; round < 2; ++round) {
    const CUdeviceptr address = allocated(101 * kMiB);
    const CUdeviceptr small = allocated(kMiB);
    for (std::size_t at = 0; at < 101; at += 2)
      fill(address + at * kMiB, kMiB, static_cast<unsigned char>(at + 1));
    fill(small, kMiB, 77);
    ASSERT_TRUE(save_managed().ok());
    ASSERT_TRUE(retake_managed().ok());
    for (std::size_t at = 0; at < 101; ++at)
      ASSERT_TRUE(
          holds(address + at * kMiB, kMiB, at % 2 ? 0 : static_cast<unsigned char>(at + 1)));
    EXPECT_TRUE(holds(small, kMiB, 77));
    // Room for all but one block: what fails is told, and nothing is lost.
    EXPECT_FALSE(save_managed(50 * 2 * kMiB).ok());
    ASSERT_TRUE(retake_managed().ok());
    for (std::size_t at = 0; at < 101; at += 2)
      ASSERT_TRUE(holds(address + at * kMiB, kMiB, static_cast<unsigned char>(at + 1)));
    hooks::cuMemFree_v2(address);
    hooks::cuMemFree_v2(small);
  }
}

TEST_F(AgentManaged, AdviceForMoreTakesThePlaceOfAdviceForLess) {
  const CUdeviceptr address = allocated(8 * kMiB);
  using Advice = FakeDriver::Advice;
  for (std::size_t at = 0; at < 100; ++at)
    hooks::cuMemAdvise(address + at * 4096, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0);
  hooks::cuMemAdvise(address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 1);
  hooks::cuMemAdvise(address, 8 * kMiB, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0);
  hooks::cuMemAdvise(address + 4096, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0);
  fake().advice.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(
      fake().advice,
      (std::vector<Advice>{{address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 1},
                           {address, 4096, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0},
                           {address + 8192, 8 * kMiB - 8192, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0},
                           {address + 4096, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0}}));
}

TEST_F(AgentManaged, APlaceIsToldByItsKind) {
  const CUdeviceptr address = allocated(8 * kMiB);
  // The first as a number is what the second GPU's ordinal is.
  const std::uint64_t first_gpu = CU_MEM_LOCATION_TYPE_DEVICE;
  hooks::cuMemAdvise(address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 1);
  hooks::cuMemAdvise_v2(address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, first_gpu);
  fake().advice.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().advice.size(), 2U);
  // And the same GPU by both ways is one.
  hooks::cuMemAdvise(address, 4096, CU_MEM_ADVISE_UNSET_ACCESSED_BY, 0);
  fake().advice.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().advice,
            (std::vector<FakeDriver::Advice>{{address, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 1},
                                             {address, 4096, CU_MEM_ADVISE_UNSET_ACCESSED_BY, 0}}));
}

TEST_F(AgentManaged, WhatIsSaidOfEachPageTakesNoLookAtAllOfThem) {
  const CUdeviceptr address = allocated(200 * kMiB);
  for (std::size_t at = 0; at < 5000; ++at)
    hooks::cuMemAdvise(address + at * 4096, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0);
  // Beside many pieces of advice the last prefetch is known.
  hooks::cuMemPrefetchAsync(address, kMiB, 0, nullptr);
  fake().advice.clear();
  fake().prefetched.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().advice.size(), 5000U);
  EXPECT_EQ(fake().prefetched.size(), 1U);
}

TEST_F(AgentManaged, APartThatWasBroughtElsewhereLaterIsNotBroughtBack) {
  const CUdeviceptr address = allocated(8 * kMiB);
  fill(address, 8 * kMiB, 3);
  using Advice = FakeDriver::Advice;
  hooks::cuMemPrefetchAsync(address, 8 * kMiB, kDeviceCpu, nullptr);
  hooks::cuMemPrefetchAsync(address + 2 * kMiB + 5, kMiB, 0, nullptr);
  fake().prefetched.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  const CUdeviceptr behind = address + 3 * kMiB + 4096;
  EXPECT_EQ(fake().prefetched,
            (std::vector<Advice>{{address + 2 * kMiB + 5, kMiB, {}, 0},
                                 {address, 2 * kMiB, {}, kDeviceCpu},
                                 {behind, address + 8 * kMiB - behind, {}, kDeviceCpu}}));
}

TEST_F(AgentManaged, WhereTheProcessorMayNotTouchItWhileTheGpuWorksItIsTheDrivers) {
  fake().without_concurrent_access.insert(0);
  CUdeviceptr address = 0;
  EXPECT_EQ(hooks::cuMemAllocManaged(&address, 4096, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
  EXPECT_EQ(managed_areas(), 0U);
  hooks::cuMemFree_v2(address);
}

TEST_F(AgentManaged, ToTheProcessorOnlyWhatWasThereIsBrought) {
  const CUdeviceptr on_gpu = allocated(8 * kMiB);
  const CUdeviceptr on_cpu = allocated(8 * kMiB);
  fill(on_cpu, 8 * kMiB, 3);
  for (const auto address : {on_gpu, on_cpu})
    EXPECT_EQ(hooks::cuMemPrefetchAsync(address, 8 * kMiB, kDeviceCpu, nullptr), CUDA_SUCCESS);
  fake().prefetched.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().prefetched,
            (std::vector<FakeDriver::Advice>{{on_cpu, 8 * kMiB, {}, kDeviceCpu}}));
}

TEST_F(AgentManaged, WhereItWasBroughtLastItIsBroughtAgain) {
  const CUdeviceptr address = allocated(8 * kMiB);
  using Advice = FakeDriver::Advice;
  EXPECT_EQ(hooks::cuMemPrefetchAsync(address, kMiB, 0, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemPrefetchAsync(address + 2 * kMiB, kMiB, 1, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemPrefetchAsync(address, 2 * kMiB, 1, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuMemPrefetchAsync(address, 8 * kMiB + 1, 1, nullptr), CUDA_ERROR_INVALID_VALUE)
      << "more than was asked for";
  fake().prefetched.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().prefetched,
            (std::vector<Advice>{{address + 2 * kMiB, kMiB, {}, 1}, {address, 2 * kMiB, {}, 1}}));
  // Parts that are others each time do not fill the memory.
  for (std::size_t at = 0; at < 2000; ++at)
    hooks::cuMemPrefetchAsync(address + at * 4096, 4096, 0, nullptr);
  fake().prefetched.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(fake().prefetched.size(), 512U);
  EXPECT_EQ(fake().prefetched.back().address, address + 1999 * 4096);
}

TEST_F(AgentManaged, WhatWasAttachedToAStreamOfAnotherContextIsForgottenWithThat) {
  const CUdeviceptr address = allocated(kMiB);
  CUcontext other = nullptr;
  EXPECT_EQ(hooks::cuCtxCreate_v2(&other, 0, 0), CUDA_SUCCESS);
  auto* stream = reinterpret_cast<CUstream>(0x79);
  fake().stream_contexts[stream] = other;
  EXPECT_EQ(hooks::cuStreamAttachMemAsync(stream, address, 0, CU_MEM_ATTACH_SINGLE), CUDA_SUCCESS);
  EXPECT_EQ(hooks::cuCtxDestroy_v2(other), CUDA_SUCCESS);
  fake().attached.clear();
  ASSERT_TRUE(save_managed().ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_TRUE(fake().attached.empty());
}

TEST_F(AgentManaged, SizesAreThoseThatWereAskedFor) {
  const CUdeviceptr address = allocated(100000);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  EXPECT_EQ(hooks::cuMemGetAddressRange_v2(&base, &size, address + 99999), CUDA_SUCCESS);
  EXPECT_EQ(base, address);
  EXPECT_EQ(size, 100000);
  EXPECT_EQ(hooks::cuMemGetAddressRange_v2(&base, &size, address + 100000), CUDA_ERROR_NOT_FOUND);
  std::size_t attribute = 0;
  EXPECT_EQ(hooks::cuPointerGetAttribute(&attribute, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address),
            CUDA_SUCCESS);
  EXPECT_EQ(attribute, 100000);
  EXPECT_EQ(
      hooks::cuPointerGetAttribute(&attribute, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address + 100000),
      CUDA_ERROR_INVALID_VALUE);
}

TEST_F(AgentManaged, WhatIsFreedOrGoesWithItsContextIsForgotten) {
  const CUdeviceptr first = allocated(kMiB);
  allocated(33 * kMiB);
  EXPECT_EQ(managed_areas(), 3);
  EXPECT_EQ(hooks::cuMemFree_v2(first), CUDA_SUCCESS);
  EXPECT_EQ(managed_areas(), 2);
  EXPECT_EQ(hooks::cuMemFree_v2(first), CUDA_ERROR_INVALID_VALUE);
  // A free that the driver refuses leaves all as it is.
  fake().fail_at("cuMemFree", 1);
  EXPECT_NE(hooks::cuMemFree_v2(given_[1]), CUDA_SUCCESS);
  EXPECT_EQ(managed_areas(), 2);
  EXPECT_EQ(hooks::cuCtxDestroy_v2(context_), CUDA_SUCCESS);
  EXPECT_EQ(managed_areas(), 0);
}

TEST_F(AgentManaged, AFailureOnTheWayOutLeavesTheRestAndIsTakenBack) {
  for (int i = 1; i <= 3; ++i)
    fill(allocated(kMiB), kMiB, i);
  fake().fail_at("cuMemFree", 2);
  EXPECT_FALSE(save_managed().ok());
  EXPECT_EQ(managed_away(), 1);
  ASSERT_TRUE(retake_managed().ok());
  for (int i = 1; i <= 3; ++i)
    EXPECT_TRUE(holds(given_[static_cast<std::size_t>(i) - 1], kMiB, i));
}

TEST_F(AgentManaged, AFailureOnTheWayBackLeavesTheContentWhereItWas) {
  for (const char* call : {"cuMemAllocManaged", "cuMemcpyHtoD"}) {
    const CUdeviceptr address = allocated(kMiB);
    // By the device, as the processor has not touched it: the mapping is the same memory here.
    fill(address, kMiB, 7);
    ::madvise(bytes_at(address), kMiB, MADV_DONTNEED);
    ASSERT_TRUE(save_managed().ok());
    fake().fail_at(call, 1);
    EXPECT_FALSE(retake_managed().ok()) << call;
    EXPECT_EQ(managed_away(), 1);
    EXPECT_TRUE(holds(address, kMiB, 7));
    ASSERT_TRUE(retake_managed().ok());
    EXPECT_TRUE(holds(address, kMiB, 7));
    EXPECT_EQ(hooks::cuMemFree_v2(address), CUDA_SUCCESS);
  }
}

TEST_F(AgentManaged, AnAddressThatIsTakenMeanwhileIsWaitedFor) {
  const CUdeviceptr address = allocated(kMiB);
  fill(address, kMiB, 3);
  void* other = nullptr;
  // Another thread's, in the moment in which nothing is there.
  fake().within("cuMemFree", [&] {
    fake().within("cuMemAllocManaged", [&] {
      other = ::mmap(bytes_at(address), 4096, PROT_READ,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    });
  });
  ASSERT_TRUE(save_managed().ok());
  EXPECT_FALSE(retake_managed().ok());
  ASSERT_EQ(other, bytes_at(address));
  EXPECT_EQ(managed_away(), 1);
  EXPECT_FALSE(retake_managed().ok());
  ::munmap(other, 4096);
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_TRUE(holds(address, kMiB, 3));
}

TEST_F(AgentManaged, SmallPiecesTakeTheHostsMemoryByPages) {
  constexpr std::size_t kPieces = 64;
  std::vector<CUdeviceptr> pieces;
  for (std::size_t i = 0; i < kPieces; ++i) {
    pieces.push_back(allocated(5000));
    fill(pieces.back(), 5000, static_cast<unsigned char>(i + 1));
  }
  // Two pages each, for which the driver gives two back: no more counts as taken, and no more is.
  EXPECT_FALSE(save_managed(8191).ok());
  ASSERT_TRUE(save_managed(8192).ok());
  std::size_t pages = 0;
  for (const auto piece : pieces) {
    std::vector<unsigned char> resident(2 * kMiB / 4096);
    ASSERT_EQ(::mincore(bytes_at(piece), 2 * kMiB, resident.data()), 0);
    pages += static_cast<std::size_t>(std::count(resident.begin(), resident.end(), 1));
  }
  EXPECT_EQ(pages, kPieces * 2);
  ASSERT_TRUE(retake_managed().ok());
  for (std::size_t i = 0; i < kPieces; ++i)
    EXPECT_TRUE(holds(pieces[i], 5000, static_cast<unsigned char>(i + 1)));
}

TEST_F(AgentManaged, WhatIsAllocatedBesideACaptureLeaves) {
  allocated(4096);
  auto* stream = reinterpret_cast<CUstream>(0x77);
  fake().stream_contexts[stream] = context_;
  EXPECT_EQ(hooks::cuStreamBeginCapture_v2(stream, 2), CUDA_SUCCESS);
  allocated(4096);
  EXPECT_EQ(managed_areas(), 2);
  EXPECT_EQ(hooks::cuStreamEndCapture(stream, nullptr), CUDA_SUCCESS);
}

TEST_F(AgentManaged, WhatTheHostHasNoRoomForStays) {
  const CUdeviceptr address = allocated(8 * kMiB);
  fill(address, 8 * kMiB, 4);
  const auto refused = save_managed(5 * kMiB);
  EXPECT_EQ(refused.result, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(managed_away(), 0);
  EXPECT_TRUE(holds(address, 8 * kMiB, 4));
  EXPECT_TRUE(save_managed(8 * kMiB).ok());
  EXPECT_TRUE(retake_managed().ok());
}

TEST_F(AgentManaged, WhatWasNeverTouchedTakesNoRoomOnTheHost) {
  allocated(16 * kMiB);
  const CUdeviceptr address = allocated(4 * kMiB);
  allocated(16 * kMiB);
  fill(address, 4 * kMiB, 4);
  ASSERT_TRUE(save_managed(5 * kMiB).ok());
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_TRUE(holds(address, 4 * kMiB, 4));
}

TEST_F(AgentManaged, TheCountOfSharedPiecesHasThem) {
  std::uint32_t count = 0;
  allocated(kMiB);
  count_shared(count);
  EXPECT_EQ(count, 1);
  EXPECT_TRUE(list_shared().empty());
  ASSERT_TRUE(save_managed().ok());
  EXPECT_EQ(detached_count(), 1);
  ASSERT_TRUE(retake_managed().ok());
  EXPECT_EQ(detached_count(), 0);
}

}  // namespace
}  // namespace stasis::preload
