// What the questions about pools have in common (calls_pool*.cc).
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "calls.h"

namespace stasis::agent_test {

using namespace cuda;  // NOLINT(google-build-using-namespace): of the files of one program

inline CUdevice g_device = 0;

inline CUmemoryPool default_pool() {
  CUmemoryPool pool = nullptr;
  CU(cuDeviceGetDefaultMemPool)(&pool, g_device);
  return pool;
}

inline unsigned long long attribute(CUmemoryPool pool, CUmemPool_attribute which) {
  unsigned long long value = 0;
  const auto result = CU(cuMemPoolGetAttribute)(pool, which, &value);
  return result == CUDA_SUCCESS ? value : 1000000000000ULL + result;
}

inline CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute which,
                              unsigned long long value) {
  return CU(cuMemPoolSetAttribute)(pool, which, &value);
}

inline void say_pool(CUmemoryPool pool, bool high = false) {
  say("reserved", static_cast<long long>(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)));
  say("used", static_cast<long long>(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT)));
  if (!high) return;
  say("most reserved", static_cast<long long>(attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)));
  say("most used", static_cast<long long>(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH)));
}

inline CUmemPoolProps props_of(int device, unsigned handle_types = 0) {
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.handleTypes = static_cast<CUmemAllocationHandleType>(handle_types);
  props.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return props;
}

// A pool that is not asked how much of it is in use: the driver (580.159.04) counts what was freed
// by cuMemFree for ever.
inline CUmemoryPool pool_for_frees_at_once() {
  const auto props = props_of(g_device);
  CUmemoryPool pool = nullptr;
  SAY(CU(cuMemPoolCreate)(&pool, &props));
  return pool;
}

inline CUstream new_stream(unsigned flags = 1) {
  CUstream stream = nullptr;
  CU(cuStreamCreate)(&stream, flags);
  return stream;
}

inline CUdeviceptr allocate_in(CUstream stream, std::size_t bytes) {
  CUdeviceptr address = 0;
  say("alloc", CU(cuMemAllocAsync)(&address, bytes, stream));
  return address;
}

inline void work_for(CUstream stream, int milliseconds) {
  CU(cuLaunchHostFunc)
  (
      stream,
      [](void* time) {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(reinterpret_cast<std::intptr_t>(time)));
      },
      reinterpret_cast<void*>(static_cast<std::intptr_t>(milliseconds)));
}

void try_captures();
void try_peers_of_pools(CUcontext first);

}  // namespace stasis::agent_test
