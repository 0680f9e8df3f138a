// Stream-ordered memory: pools, what is allocated from them, frees in a stream's order.
//
// What the program sees is to be as with the driver's own (580.159.04 on an H100, measured:
// tests/agent/calls_pools.cc).
#include <algorithm>
#include <atomic>

#include "activation.h"
#include "agent.h"
#include "eviction_internal.h"
#include "gate.h"
#include "hooks.h"
#include "intercept.h"
#include "pools.h"
#include "sharing.h"
#include "thread.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

bool captures_in_progress_now() { return tables().captures.load(std::memory_order_relaxed) != 0; }

// Allocations in it become nodes of a graph, which are the driver's.
bool is_captured(CUstream stream, bool per_thread) {
  if (!captures_in_progress_now() || !driver().cuStreamIsCapturing) return false;
  if (per_thread && !stream) stream = kStreamPerThread;
  // The legacy default stream cannot be captured, and to ask of it may spoil other captures.
  if (!stream || stream == kStreamLegacy) return false;
  unsigned status = 0;
  return driver().cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != 0;
}

// While a stream is captured the driver refuses all that has to do with pools, unless the thread
// has said that it knows what it does; and the refusal spoils the capture. Only the driver can
// tell.
CUresult ask_driver_about_pools(CUmemoryPool pool, CUdevice device) {
  if (!captures_in_progress_now()) return CUDA_SUCCESS;
  if (!pool) driver().cuDeviceGetDefaultMemPool(&pool, device);
  std::uint64_t threshold = 0;
  return driver().cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
}

// From `pool`, or from the current one of the stream's device.
template <class Call>
CUresult allocate(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool, CUstream stream,
                  bool per_thread, Call ask_driver) {
  const Gate::Pass pass;
  if (!pointer || bytes == 0 || !serves_pools() || is_captured(stream, per_thread))
    return ask_driver();
  const auto name = name_of(stream, per_thread);
  if (!name || !name->can_be_marked) return ask_driver();
  if (!pool && driver().cuDeviceGetMemPool(&pool, name->device) != CUDA_SUCCESS)
    return ask_driver();
  if (const auto result = ask_driver_about_pools(pool, name->device); result != CUDA_SUCCESS)
    return result;
  const auto address = allocate_from_pool(pool, bytes, *name);
  // Whatever the reason, the program gets the driver's own answer.
  if (!address) return ask_driver();
  *pointer = address;
  Agent::start();
  return CUDA_SUCCESS;
}

template <class Call>
CUresult free_in_stream(Call* call, CUdeviceptr pointer, CUstream stream, bool per_thread) {
  const Gate::Pass pass;
  const auto block = pool_block_at(pointer);
  if (!block && in_pool(pointer)) return CUDA_ERROR_INVALID_VALUE;
  const auto found = block ? std::nullopt : find_allocation(pointer);
  if (!block && !found) return free_of_driver(pointer, [&] { return call(pointer, stream); });
  // As the driver says of what is not a node of the graph.
  if (is_captured(stream, per_thread)) return CUDA_ERROR_INVALID_VALUE;
  // Not of its beginning; or another process's, which cuIpcCloseMemHandle gives up.
  if (block ? block->address != pointer : found->opening() != nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  const auto name = name_of(stream, per_thread);
  // A driver of before CUDA 12 has no numbers for streams: all work is waited for.
  if (!name && !driver().cuStreamGetId) return hooks::cuMemFree_v2(pointer);
  // A stream that the driver does not know: it says so of any memory.
  if (!name) return call(pointer, stream);
  if (const auto result = ask_driver_about_pools(nullptr, name->device); result != CUDA_SUCCESS)
    return result;
  if (!name->can_be_marked) {
    // Later than the driver would, and right.
    if (const auto waited = driver().cuStreamSynchronize(stream); waited != CUDA_SUCCESS)
      return waited;
    return block ? free_to_pool(*block) : hooks::cuMemFree_v2(pointer);
  }
  if (block) return free_when_passed(*block, *name);
  const auto freed = take_own(pointer);
  // Another thread has freed it meanwhile: the program's mistake.
  if (!freed) return CUDA_ERROR_INVALID_VALUE;
  const auto result = free_when_passed(pointer, *freed, *name);
  if (result == CUDA_SUCCESS) return result;
  const TablesLock lock;
  tables().allocations.emplace(pointer, *freed);
  return result;
}

// The driver's call may be where a thread is cancelled, as without the agent; ours is not.
CUresult waited(CUresult result) {
  const Uncancelled uncancelled;
  if (result == CUDA_SUCCESS) after_wait();
  return result;
}

}  // namespace

// Waits for nothing: the program says that all is done with it (CUDA's manual, and so the driver).
CUresult free_pooled(CUdeviceptr pointer) {
  const auto block = pool_block_at(pointer);
  if (!block || block->address != pointer) return CUDA_ERROR_INVALID_VALUE;
  CUdevice device = 0;
  driver().cuCtxGetDevice(&device);
  if (const auto result = ask_driver_about_pools(block->pool, device); result != CUDA_SUCCESS)
    return result;
  return free_to_pool(*block);
}

namespace hooks {

CUresult cuMemAllocAsync(CUdeviceptr* pointer, std::size_t bytes, CUstream stream) {
  return allocate(pointer, bytes, nullptr, stream, false,
                  [&] { return driver().cuMemAllocAsync(pointer, bytes, stream); });
}
CUresult cuMemAllocAsync_ptsz(CUdeviceptr* pointer, std::size_t bytes, CUstream stream) {
  return allocate(pointer, bytes, nullptr, stream, true,
                  [&] { return driver().cuMemAllocAsync_ptsz(pointer, bytes, stream); });
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool,
                                 CUstream stream) {
  const auto ask_driver = [&] {
    return driver().cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
  };
  if (!pool) return ask_driver();
  return allocate(pointer, bytes, pool, stream, false, ask_driver);
}
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool,
                                      CUstream stream) {
  const auto ask_driver = [&] {
    return driver().cuMemAllocFromPoolAsync_ptsz(pointer, bytes, pool, stream);
  };
  if (!pool) return ask_driver();
  return allocate(pointer, bytes, pool, stream, true, ask_driver);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
  return free_in_stream(driver().cuMemFreeAsync, pointer, stream, false);
}
CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
  return free_in_stream(driver().cuMemFreeAsync_ptsz, pointer, stream, true);
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* props) {
  const Gate::Pass pass;
  const auto result = driver().cuMemPoolCreate(pool, props);
  if (result == CUDA_SUCCESS && serves_pools()) note_pool(*pool, *props);
  return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  const Gate::Pass pass;
  PoolEnd end(pool);
  const auto result = driver().cuMemPoolDestroy(pool);
  if (result == CUDA_SUCCESS) {
    const TablesLock lock;
    tables().beyond.imported_pools.erase(pool);
  }
  if (result == CUDA_SUCCESS)
    end.happened();
  else
    end.did_not_happen();
  return result;
}

// The driver's alone: the agent cannot give up what is another process's pool.
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool* pool, void* handle,
                                            CUmemAllocationHandleType type,
                                            unsigned long long flags) {
  const Gate::Pass pass;
  const SharingCall sharing;
  const auto result = driver().cuMemPoolImportFromShareableHandle(pool, handle, type, flags);
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  tables().beyond.imported_pools.insert(*pool);
  return result;
}

CUresult cuMemPoolImportPointer(CUdeviceptr* pointer, CUmemoryPool pool, void* data) {
  const Gate::Pass pass;
  const SharingCall sharing;
  const auto result = driver().cuMemPoolImportPointer(pointer, pool, data);
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  tables().beyond.imported_pointers.insert(*pointer);
  return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, std::size_t keep) {
  const Gate::Pass pass;
  const auto result = driver().cuMemPoolTrimTo(pool, keep);
  if (result == CUDA_SUCCESS) trim_pool(pool, keep);
  return result;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  const Gate::Pass pass;
  const auto result = driver().cuMemPoolSetAttribute(pool, attribute, value);
  if (result == CUDA_SUCCESS) note_pool_attribute(pool, attribute, value);
  return result;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  const Gate::Pass pass;
  const auto result = driver().cuMemPoolGetAttribute(pool, attribute, value);
  if (result != CUDA_SUCCESS) return result;
  const auto use = use_of_pool(pool);
  auto* bytes = static_cast<std::uint64_t*>(value);
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) *bytes += use.reserved;
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) *bytes += use.reserved_high;
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT) *bytes += use.used;
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) *bytes += use.used_high;
  return result;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* rights, std::size_t count) {
  const Gate::Pass pass;
  const auto result = driver().cuMemPoolSetAccess(pool, rights, count);
  if (result != CUDA_SUCCESS || !serves_pools()) return result;
  return note_pool_access(pool, rights, count);
}

// What the driver says of its own pools' memory.
CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr pointer) {
  const Gate::Pass pass;
  const auto result = driver().cuMemGetAccess(flags, location, pointer);
  if (result == CUDA_SUCCESS && in_pool(pointer)) *flags = 0;
  return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
  const Gate::Pass pass;
  return waited(driver().cuStreamSynchronize(stream));
}
CUresult cuStreamSynchronize_ptsz(CUstream stream) {
  const Gate::Pass pass;
  return waited(driver().cuStreamSynchronize_ptsz(stream));
}
CUresult cuEventSynchronize(CUevent event) {
  const Gate::Pass pass;
  return waited(driver().cuEventSynchronize(event));
}
CUresult cuCtxSynchronize() {
  const Gate::Pass pass;
  return waited(driver().cuCtxSynchronize());
}
CUresult cuCtxSynchronize_v2(CUcontext context) {
  const Gate::Pass pass;
  return waited(driver().cuCtxSynchronize_v2(context));
}

}  // namespace hooks
}  // namespace stasis::preload
