// Stream-ordered memory: what a program sees of pools and of what it has from them.
#include "calls_pools.h"

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace stasis::agent_test {

namespace {

// The simulated driver has none of these.
namespace fn {
using cuMemPoolExportToShareableHandle = CUresult(void* handle, CUmemoryPool pool, unsigned type,
                                                  unsigned long long flags);
using cuMemPoolExportPointer = CUresult(void* data, CUdeviceptr pointer);
}  // namespace fn

void try_attributes() {
  std::printf("== pools: attributes\n");
  const auto pool = default_pool();
  CUmemoryPool current = nullptr;
  SAY(CU(cuDeviceGetMemPool)(&current, g_device));
  SAY(current == pool);
  for (const unsigned which : {1U, 2U, 3U}) {
    int value = 77;
    SAY(CU(cuMemPoolGetAttribute)(pool, static_cast<CUmemPool_attribute>(which), &value));
    SAY(value);
  }
  SAY(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
  say_pool(pool, true);
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, 0));
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 1));
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0));
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0));
  SAY(CU(cuMemPoolDestroy)(pool));
  SAY(CU(cuMemPoolTrimTo)(pool, 0));
  SAY(CU(cuMemPoolTrimTo)(nullptr, 0));
  unsigned long long value = 0;
  SAY(CU(cuMemPoolGetAttribute)(nullptr, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
  SAY(CU(cuMemPoolGetAttribute)(pool, static_cast<CUmemPool_attribute>(99), &value));
  SAY(CU(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, nullptr));
}

void try_sizes(CUcontext context) {
  const auto pool = default_pool();
  const auto stream = new_stream();
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{512}, std::size_t{513},
                                 kMiB, 2 * kMiB, 2 * kMiB + 1, 5 * kMiB + 777, 32 * kMiB,
                                 32 * kMiB + 1, 100 * kMiB, std::size_t{1} << 60, SIZE_MAX}) {
    std::printf("== pools: %zu bytes\n", size);
    const auto address = allocate_in(stream, size);
    say_pool(pool);
    if (!address) continue;
    SAY(address % 512);
    SAY(CU(cuStreamSynchronize)(stream));
    ask_about("begin", address, address, context);
    ask_about("last byte", address + size - 1, address, context);
    CUmemoryPool its = nullptr;
    SAY(CU(cuPointerGetAttribute)(&its, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address));
    SAY(its == pool);
    if (size == 5 * kMiB + 777) {
      ask_behind(address + (size + 511) / 512 * 512);
      SAY(spoiled(address, size, 0x5a));
      CUmemGenericAllocationHandle handle = 0;
      SAY(CU(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(address)));
      CUipcMemHandle ipc{};
      SAY(CU(cuIpcGetMemHandle)(&ipc, address));
      ask_for_dma_buf(address / kMiB * kMiB, 2 * kMiB);
      const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, g_device},
                                  CU_MEM_ACCESS_FLAGS_PROT_READ};
      SAY(CU(cuMemSetAccess)(address, 2 * kMiB, &right, 1));
      SAY(CU(cuMemUnmap)(address, 2 * kMiB));
      const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, g_device};
      unsigned long long flags = 99;
      SAY(CU(cuMemGetAccess)(&flags, &location, address));
      SAY(flags);
      if (has("cuMemPoolExportPointer")) {
        std::vector<unsigned char> data(64);
        SAY(OTHER(cuMemPoolExportPointer)(data.data(), address));
      }
    }
    SAY(CU(cuMemFreeAsync)(address + 1, stream));
    SAY(CU(cuMemFreeAsync)(address, stream));
    // Until the stream has got there the driver may know it or not.
    SAY(CU(cuStreamSynchronize)(stream));
    say_pool(pool);
    SAY(CU(cuMemFreeAsync)(address, stream));
    SAY(CU(cuMemFree_v2)(address));
    CUdeviceptr base = 0;
    SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, address));
  }
  SAY(CU(cuMemAllocAsync)(nullptr, kMiB, stream));
  SAY(CU(cuMemFreeAsync)(0, stream));
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&address, kMiB, nullptr, stream));
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 0, pool, stream));
  SAY(CU(cuMemAllocFromPoolAsync)(nullptr, kMiB, pool, stream));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

// Pieces that lie together.
void try_small_ones() {
  std::printf("== pools: many small ones\n");
  const auto pool = default_pool();
  const auto stream = new_stream();
  std::vector<CUdeviceptr> all;
  for (std::size_t i = 0; i < 100; ++i) {
    CUdeviceptr address = 0;
    CU(cuMemAllocAsync)(&address, 1000 * (i + 1), stream);
    all.push_back(address);
  }
  say_pool(pool);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  SAY(CU(cuMemGetAddressRange_v2)(&base, &size, all[7] + 12));
  SAY(base == all[7]);
  SAY(size);
  for (std::size_t i = 0; i < all.size(); i += 2)
    CU(cuMemFreeAsync)(all[i], stream);
  SAY(CU(cuStreamSynchronize)(stream));
  say_pool(pool);
  SAY(CU(cuMemPoolTrimTo)(pool, 0));
  say_pool(pool);
  for (std::size_t i = 1; i < all.size(); i += 2)
    CU(cuMemFreeAsync)(all[i], stream);
  SAY(CU(cuStreamSynchronize)(stream));
  say_pool(pool, true);
  SAY(CU(cuStreamDestroy_v2)(stream));
}

void try_thresholds() {
  std::printf("== pools: thresholds\n");
  const auto pool = default_pool();
  const auto stream = new_stream();
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 64 * kMiB));
  SAY(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
  const auto first = allocate_in(stream, 40 * kMiB);
  const auto second = allocate_in(stream, 100 * kMiB);
  say_pool(pool);
  SAY(CU(cuMemFreeAsync)(second, stream));
  say("reserved before a wait",
      static_cast<long long>(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)));
  CUevent event = nullptr;
  SAY(CU(cuEventCreate)(&event, 0));
  SAY(CU(cuEventRecord)(event, stream));
  SAY(CU(cuEventSynchronize)(event));
  say_pool(pool);
  SAY(CU(cuMemFreeAsync)(first, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  say_pool(pool);
  SAY(CU(cuMemPoolTrimTo)(pool, 40 * kMiB));
  say_pool(pool);
  SAY(CU(cuMemPoolTrimTo)(pool, 0));
  say_pool(pool);
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ~0ULL));
  const auto third = allocate_in(stream, 100 * kMiB);
  SAY(CU(cuMemFreeAsync)(third, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  say_pool(pool);
  // Given out again, in part.
  const auto part = allocate_in(stream, 10 * kMiB);
  say_pool(pool);
  const auto rest = allocate_in(stream, 80 * kMiB);
  say_pool(pool);
  SAY(CU(cuMemFreeAsync)(part, stream));
  SAY(CU(cuMemFreeAsync)(rest, stream));
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0));
  SAY(CU(cuStreamQuery)(stream) == CUDA_SUCCESS || true);
  SAY(CU(cuCtxSynchronize)());
  say_pool(pool, true);
  SAY(CU(cuEventDestroy_v2)(event));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

// Which memory another allocation gets.
void try_reuse() {
  std::printf("== pools: who gets what was freed\n");
  const auto pool = default_pool();
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ~0ULL));
  const auto one = new_stream();
  const auto two = new_stream();
  CUevent event = nullptr;
  SAY(CU(cuEventCreate)(&event, 2));
  const auto trial = [&](const char* what, bool internal, bool opportunistic, bool follow,
                         const std::function<void()>& between, CUstream then, bool waits = false) {
    std::printf("-- %s\n", what);
    CU(cuCtxSynchronize)();
    CU(cuMemPoolTrimTo)(pool, 0);
    const int flags[] = {follow, opportunistic, internal};
    for (unsigned i = 0; i < 3; ++i) {
      int flag = flags[i];
      CU(cuMemPoolSetAttribute)(pool, static_cast<CUmemPool_attribute>(i + 1), &flag);
    }
    CUdeviceptr first = 0;
    CUdeviceptr second = 0;
    CU(cuMemAllocAsync)(&first, 40 * kMiB, one);
    work_for(one, 60);
    SAY(CU(cuMemFreeAsync)(first, one));
    between();
    SAY(CU(cuMemAllocAsync)(&second, 40 * kMiB, then));
    // The driver knows what a stream waits for by events; the agent takes more memory then.
    if (!follow || !waits) SAY(first == second);
    // Whether the stream now waits for the other.
    SAY(CU(cuStreamQuery)(then));
    if (!follow || !waits) say_pool(pool);
    SAY(CU(cuMemFreeAsync)(second, then));
    CU(cuCtxSynchronize)();
  };
  const auto nothing = [] {};
  trial("the same stream", true, true, true, nothing, one);
  trial("another, as it comes", true, true, true, nothing, two);
  trial("another, without dependencies", false, true, true, nothing, two);
  trial(
      "another, that waits by an event", false, true, true,
      [&] {
        CU(cuEventRecord)(event, one);
        CU(cuStreamWaitEvent)(two, event, 0);
      },
      two, true);
  trial(
      "another, when the first is done", false, true, false,
      [&] {
        CU(cuStreamSynchronize)
        (one);
      },
      two);
  trial(
      "another, when the first is done, and may not look", false, false, false,
      [&] {
        CU(cuStreamSynchronize)
        (one);
      },
      two);
  trial("the default stream", false, false, false, nothing, nullptr);
  for (unsigned i = 1; i <= 3; ++i) {
    int flag = 1;
    CU(cuMemPoolSetAttribute)(pool, static_cast<CUmemPool_attribute>(i), &flag);
  }
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0));
  SAY(CU(cuCtxSynchronize)());
  say_pool(pool);
  SAY(CU(cuEventDestroy_v2)(event));
  SAY(CU(cuStreamDestroy_v2)(one));
  SAY(CU(cuStreamDestroy_v2)(two));
}

// A stream that is gone, and contexts.
void try_lives(CUcontext first) {
  std::printf("== pools: streams and contexts that go\n");
  const auto pool = default_pool();
  auto stream = new_stream();
  const auto kept = allocate_in(stream, 3 * kMiB);
  work_for(stream, 30);
  const auto freed = allocate_in(stream, 3 * kMiB);
  SAY(CU(cuMemFreeAsync)(freed, stream));
  SAY(CU(cuStreamDestroy_v2)(stream));
  say_pool(pool);
  SAY(spoiled(kept, 3 * kMiB, 4));
  SAY(CU(cuCtxSynchronize)());
  say_pool(pool);
  SAY(CU(cuMemFreeAsync)(kept, nullptr));
  SAY(CU(cuCtxSynchronize)());
  say_pool(pool);

  CUcontext second = nullptr;
  SAY(CU(cuCtxCreate_v2)(&second, 0, g_device));
  stream = new_stream();
  auto* const at_once = pool_for_frees_at_once();
  CUdeviceptr outlives = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&outlives, 5 * kMiB, at_once, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuCtxSynchronize)());
  ask_about("of the second context", outlives, outlives, second);
  SAY(CU(cuCtxSetCurrent)(first));
  SAY(spoiled(outlives, 5 * kMiB, 6));
  // A stream of another context than the current one.
  CUdeviceptr across = 0;
  SAY(CU(cuMemAllocAsync)(&across, 5 * kMiB, stream));
  SAY(CU(cuMemFreeAsync)(across, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  say_pool(pool);
  SAY(CU(cuCtxDestroy_v2)(second));
  SAY(CU(cuCtxSetCurrent)(first));
  say_pool(pool);
  SAY(spoiled(outlives, 5 * kMiB, 7));
  CUdeviceptr base = 0;
  SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, outlives));
  SAY(base == outlives);
  // To free it in a stream crashes (580.159.04).
  SAY(CU(cuMemFree_v2)(outlives));
  SAY(CU(cuMemPoolDestroy)(at_once));
  SAY(CU(cuCtxSynchronize)());
  SAY(CU(cuMemAllocAsync)(&across, 4096, reinterpret_cast<CUstream>(1)));
  SAY(CU(cuMemFreeAsync)(across, reinterpret_cast<CUstream>(2)));
  SAY(CU(cuCtxSynchronize)());
  std::thread([&] {
    CUdeviceptr none = 0;
    SAY(CU(cuMemAllocAsync)(&none, 4096, nullptr));
    SAY(CU(cuMemFreeAsync)(4096, nullptr));
  }).join();
  say_pool(pool);
}

void try_own_pools() {
  std::printf("== pools: of the program\n");
  auto props = props_of(g_device);
  CUmemoryPool pool = nullptr;
  SAY(CU(cuMemPoolCreate)(&pool, &props));
  SAY(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
  const auto stream = new_stream();
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 5 * kMiB, pool, stream));
  say_pool(pool, true);
  CUmemoryPool its = nullptr;
  SAY(CU(cuPointerGetAttribute)(&its, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address));
  SAY(its == pool);
  SAY(CU(cuDeviceSetMemPool)(g_device, pool));
  const auto by_current = allocate_in(stream, kMiB);
  SAY(CU(cuPointerGetAttribute)(&its, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, by_current));
  SAY(its == pool);
  say_pool(pool);
  CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, g_device};
  auto flags = static_cast<CUmemAccess_flags>(77);
  SAY(CU(cuMemPoolGetAccess)(&flags, pool, &location));
  SAY(flags);
  const CUmemAccessDesc none{location, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  SAY(CU(cuMemPoolSetAccess)(pool, &none, 1));
  const CUmemAccessDesc reads{location, CU_MEM_ACCESS_FLAGS_PROT_READ};
  SAY(CU(cuMemPoolSetAccess)(pool, &reads, 1));
  if (has("cuMemPoolExportToShareableHandle")) {
    int fd = -1;
    SAY(OTHER(cuMemPoolExportToShareableHandle)(&fd, pool, 1, 0));
  }
  SAY(CU(cuMemFreeAsync)(address, stream));
  SAY(CU(cuMemFreeAsync)(by_current, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemPoolDestroy)(pool));
  CUmemoryPool current = nullptr;
  SAY(CU(cuDeviceGetMemPool)(&current, g_device));
  SAY(current == default_pool());
  try_pool_in_use();
  // By the call that waits for nothing here: the program says that it is done (CUDA's manual).
  pool = pool_for_frees_at_once();
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 5 * kMiB, pool, stream));
  work_for(stream, 50);
  SAY(CU(cuMemFree_v2)(address));
  SAY(CU(cuStreamQuery)(stream));
  SAY(CU(cuStreamSynchronize)(stream));
  // Not freed again: on an H200 (580.159.04) the driver says 1, and ends the program when the pool
  // is destroyed.
  SAY(CU(cuMemPoolDestroy)(pool));
  // With a limit, and one that others may open.
  props.maxSize = 64 * kMiB;
  SAY(CU(cuMemPoolCreate)(&pool, &props));
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 5 * kMiB, pool, stream));
  CUdeviceptr more = 0;
  SAY(CU(cuMemAllocFromPoolAsync)(&more, 80 * kMiB, pool, stream));
  SAY(CU(cuMemFreeAsync)(address, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemPoolDestroy)(pool));
  props = props_of(g_device, 1);
  SAY(CU(cuMemPoolCreate)(&pool, &props));
  SAY(CU(cuMemAllocFromPoolAsync)(&address, 5 * kMiB, pool, stream));
  SAY(spoiled(address, 5 * kMiB, 8));
  SAY(CU(cuMemFreeAsync)(address, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemPoolDestroy)(pool));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

// Frees that do not wait, of both kinds of memory.
void try_order() {
  std::printf("== pools: the order of the stream\n");
  const auto stream = new_stream();
  const auto pooled = allocate_in(stream, 4 * kMiB);
  CUdeviceptr plain = 0;
  SAY(CU(cuMemAlloc_v2)(&plain, 64 * kMiB));
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemGetInfo_v2)(&before, &total));
  work_for(stream, 200);
  SAY(CU(cuMemsetD8Async)(pooled, 1, 4 * kMiB, stream));
  SAY(CU(cuMemsetD8Async)(plain, 1, 64 * kMiB, stream));
  SAY(CU(cuMemFreeAsync)(pooled, stream));
  SAY(CU(cuMemFreeAsync)(plain, stream));
  SAY(CU(cuStreamQuery)(stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemGetInfo_v2)(&after, &total));
  SAY(after - before);
  CUdeviceptr base = 0;
  SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, plain));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

// What a pool only keeps on a GPU that is full, others get all the same.
void try_full() {
  const auto pool = default_pool();
  const auto stream = new_stream();
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ~0ULL));
  for (int what = 0; what < 5; ++what) {
    std::printf("== pools: a full GPU, %d\n", what);
    std::vector<CUdeviceptr> all;
    CUdeviceptr address = 0;
    while (CU(cuMemAllocAsync)(&address, 64 * kMiB, stream) == CUDA_SUCCESS)
      all.push_back(address);
    while (CU(cuMemAllocAsync)(&address, 2 * kMiB, stream) == CUDA_SUCCESS)
      all.push_back(address);
    SAY(all.size() > 2);
    for (const auto one : all)
      CU(cuMemFreeAsync)(one, stream);
    SAY(CU(cuStreamSynchronize)(stream));
    std::size_t free = 0;
    std::size_t total = 0;
    SAY(CU(cuMemGetInfo_v2)(&free, &total));
    SAY(free < 128 * kMiB);
    CUdeviceptr plain = 0;
    std::size_t pitch = 0;
    if (what == 0) SAY(CU(cuMemAlloc_v2)(&plain, 256 * kMiB));
    if (what == 1) SAY(CU(cuMemAlloc_v2)(&plain, kMiB));
    if (what == 2) SAY(CU(cuMemAllocPitch_v2)(&plain, &pitch, 1000, 1000, 4));
    if (what == 3) SAY(CU(cuMemAllocPitch_v2)(&plain, &pitch, 100000, 1000, 4));
    if (what == 4) {
      CUmemAllocationProp prop{};
      prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
      prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, g_device};
      CUmemGenericAllocationHandle handle = 0;
      SAY(CU(cuMemCreate)(&handle, 64 * kMiB, &prop, 0));
      if (handle) SAY(CU(cuMemRelease)(handle));
    }
    if (plain) SAY(CU(cuMemFree_v2)(plain));
  }
  // More than there is: nothing waits for it.
  const auto busy = new_stream();
  CUdeviceptr none = 0;
  const auto freed = allocate_in(busy, 64 * kMiB);
  work_for(busy, 100);
  SAY(CU(cuMemFreeAsync)(freed, busy));
  SAY(CU(cuMemAllocAsync)(&none, std::size_t{1} << 40, stream));
  SAY(CU(cuStreamQuery)(stream));
  SAY(CU(cuStreamSynchronize)(busy));
  SAY(CU(cuStreamDestroy_v2)(busy));
  SAY(set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0));
  SAY(CU(cuStreamSynchronize)(stream));
  say_pool(pool);
  SAY(CU(cuMemPoolTrimTo)(pool, 0));
  say_pool(pool);
  SAY(CU(cuStreamDestroy_v2)(stream));
}

}  // namespace

void try_pools(CUcontext context) {
  CU(cuCtxGetDevice)(&g_device);
  try_attributes();
  try_sizes(context);
  try_small_ones();
  try_thresholds();
  try_reuse();
  try_lives(context);
  try_own_pools();
  try_order();
  try_full();
  try_captures();
  try_peers_of_pools(context);
}

}  // namespace stasis::agent_test
