#include "pools.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "eviction_internal.h"
#include "intercept.h"
#include "pool_store.h"

namespace stasis::preload {

using namespace cuda;        // NOLINT(google-build-using-namespace)
using namespace pool_store;  // NOLINT(google-build-using-namespace)

// --- Names

std::optional<StreamName> name_of(CUstream stream, bool per_thread) {
  const auto& call = driver();
  StreamName name;
  name.handle = stream ? stream : per_thread ? kStreamPerThread : kStreamLegacy;
  name.context = context_of(name.handle == kStreamLegacy ? nullptr : name.handle);
  if (!name.context || !call.cuStreamGetId ||
      call.cuStreamGetId(name.handle, &name.id) != CUDA_SUCCESS)
    return std::nullopt;
  bool is_green = false;
  bool is_known = false;
  {
    const TablesLock lock;
    const auto owner = owner_in(name.context);
    const auto at = tables().contexts.devices.find(owner);
    is_green = owner != name.context;
    is_known = at != tables().contexts.devices.end();
    if (is_known) name.device = at->second;
  }
  // A green context is current in one thread alone.
  CUcontext now = nullptr;
  name.can_be_marked =
      !is_green || (call.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == name.context);
  if (is_known) return name;
  if (is_green) return std::nullopt;
  const CurrentContext current(name.context);
  if (call.cuCtxGetDevice(&name.device) != CUDA_SUCCESS) return std::nullopt;
  const TablesLock lock;
  tables().contexts.devices.emplace(owner_in(name.context), name.device);
  return name;
}

void note_pool(CUmemoryPool pool, const CUmemPoolProps& props) {
  const bool served = props.allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
                      props.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                      props.handleTypes == CU_MEM_HANDLE_TYPE_NONE && props.maxSize == 0 &&
                      props.usage == 0;
  const PoolsLock lock;
  pools().known[pool] = {props.location.id, served, false};
}

PoolEnd::PoolEnd(CUmemoryPool handle) : handle_(handle) {
  const PoolsLock lock;
  const auto at = pools().known.find(handle);
  // The driver destroys none of its own.
  if (at == pools().known.end() || at->second.is_default) return;
  was_known_ = true;
  device_ = at->second.device;
  served_ = at->second.served;
  pools().known.erase(at);
  auto* pool = pool_of(handle);
  if (!pool) return;
  pool->handle = nullptr;
  pool_ = pool;
}

void PoolEnd::happened() {
  const PoolsLock lock;
  // What is left of it is kept for nothing that may come. (Another may lie where it lay.)
  for (const auto& pool : pools().pools) {
    if (pool.get() != pool_ || pool->handle) continue;
    pool->threshold = 0;
    trim(*pool, 0);
  }
  (void)collect(Seen::kByAgent);
}

void PoolEnd::did_not_happen() {
  const PoolsLock lock;
  if (was_known_) pools().known[handle_] = {device_, served_, false};
  for (const auto& pool : pools().pools)
    if (pool.get() == pool_) pool->handle = handle_;
}

void note_pool_attribute(CUmemoryPool handle, CUmemPool_attribute attribute, const void* value) {
  const PoolsLock lock;
  auto* pool = pool_of(handle);
  if (!pool) return;
  if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) pool->reserved_high = pool->reserved();
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) pool->used_high = pool->used();
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    pool->threshold = *static_cast<const std::uint64_t*>(value);
  if (attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC)
    pool->looks_at_streams = *static_cast<const int*>(value) != 0;
  if (attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
    pool->makes_streams_wait = *static_cast<const int*>(value) != 0;
}

CUresult note_pool_access(CUmemoryPool handle, const CUmemAccessDesc* rights, std::size_t count) {
  const PoolsLock lock;
  // One that is made later asks the driver.
  auto* pool = pool_of(handle);
  CUresult result = CUDA_SUCCESS;
  if (!pool) return result;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& right = rights[i];
    if (right.location.type != CU_MEM_LOCATION_TYPE_DEVICE || right.location.id == pool->device)
      continue;
    std::erase_if(pool->rights,
                  [&](const CUmemAccessDesc& old) { return old.location.id == right.location.id; });
    if (right.flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) pool->rights.push_back(right);
    std::vector<CUdeviceptr> present;
    {
      const TablesLock tables_lock;
      const auto& mappings = tables().mappings;
      for (const auto& arena : pool->arenas)
        for (auto at = mappings.lower_bound(arena->base());
             at != mappings.end() && arena->covers(at->first); ++at)
          present.push_back(at->first);
    }
    for (const auto address : present) {
      const auto given = give_rights(address, PoolArena::kUnit, {right});
      if (result == CUDA_SUCCESS) result = given;
    }
  }
  return result;
}

// --- Allocating and freeing

CUdeviceptr allocate_from_pool(CUmemoryPool handle, std::size_t bytes, const StreamName& stream) {
  std::vector<Behind> others;
  {
    const PoolsLock lock;
    auto* pool = pool_of(handle);
    if (!pool) pool = make_pool(handle);
    // More than any GPU has.
    constexpr std::size_t kLargest = std::size_t{1} << 45;
    if (!pool || bytes > kLargest) return 0;
    if (const auto found = settle(*pool, bytes, stream, false)) return found;
    if (pool->looks_at_streams) {
      (void)collect(Seen::kByAgent);
      if (const auto found = settle(*pool, bytes, stream, false)) return found;
    }
    if (const auto grown = settle(*pool, bytes, stream, true)) return grown;
    // The GPU is full, or all addresses are taken.
    if (give_back_idle_of(pool->device))
      if (const auto grown = settle(*pool, bytes, stream, true)) return grown;
    const bool would_help = pool->makes_streams_wait &&
                            std::any_of(pool->arenas.begin(), pool->arenas.end(),
                                        [&](const auto& arena) { return arena->would_fit(bytes); });
    if (would_help) others = others_with_memory(*pool, stream.id);
  }
  if (others.empty()) return 0;
  // Without the lock: the driver may have to wait until a stream takes more, and so for a thread
  // that frees.
  {
    const CurrentContext current(stream.context);
    std::erase_if(others, [&](const Behind& behind) {
      return std::any_of(behind.events.begin(), behind.events.end(), [&](CUevent event) {
        return driver().cuStreamWaitEvent(stream.handle, event, 0) != CUDA_SUCCESS;
      });
    });
  }
  CUevent event = nullptr;
  if (mark(stream, event) != CUDA_SUCCESS) return 0;
  const PoolsLock lock;
  const auto number = enter_mark(stream, event);
  auto* pool = pool_of(handle);
  if (!pool) return 0;
  for (const auto& behind : others)
    for (const auto& arena : pool->arenas)
      arena->hand_over(behind.stream, behind.last, stream.id, number);
  return settle(*pool, bytes, stream, false);
}

bool in_pool(CUdeviceptr pointer) {
  if (!are_in_use()) return false;
  const TablesLock lock;
  const auto& ranges = tables().pool_ranges;
  const auto next = ranges.upper_bound(pointer);
  return next != ranges.begin() && pointer - std::prev(next)->first < std::prev(next)->second;
}

std::optional<PoolBlock> pool_block_at(CUdeviceptr pointer) {
  if (!are_in_use()) return std::nullopt;
  const PoolsLock lock;
  const auto [pool, arena] = place_of(pointer);
  const auto block = arena ? arena->block_at(pointer) : std::nullopt;
  if (!block) return std::nullopt;
  return PoolBlock{block->address, block->asked, pool->handle,
                   pool->sync_memops.contains(block->address)};
}

void set_pool_memops(const PoolBlock& block, bool synchronous) {
  const PoolsLock lock;
  auto* pool = place_of(block.address).pool;
  if (!pool) return;
  if (synchronous)
    pool->sync_memops.insert(block.address);
  else
    pool->sync_memops.erase(block.address);
}

CUresult free_when_passed(const PoolBlock& block, const StreamName& stream) {
  CUevent event = nullptr;
  if (const auto result = mark(stream, event); result != CUDA_SUCCESS) return result;
  const PoolsLock lock;
  const auto number = enter_mark(stream, event);
  const auto [pool, arena] = place_of(block.address);
  const bool there = arena && arena->give(block.address, stream.id, number);
  if (there) pool->sync_memops.erase(block.address);
  // A program that never waits leaves one mark for each free.
  constexpr std::size_t kMany = 64;
  if (pools().streams[stream.id].marks.size() > kMany) (void)collect(Seen::kByAgent);
  // Another thread has freed it meanwhile: the program's mistake.
  return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult free_when_passed(CUdeviceptr address, const Allocation& allocation,
                          const StreamName& stream) {
  CUevent event = nullptr;
  if (const auto result = mark(stream, event); result != CUDA_SUCCESS) return result;
  const PoolsLock lock;
  note_in_use();
  pools().leaving.push_back({stream.id, enter_mark(stream, event), address, allocation});
  (void)collect(Seen::kByAgent);
  return CUDA_SUCCESS;
}

CUresult free_to_pool(const PoolBlock& block) {
  const PoolsLock lock;
  const auto [pool, arena] = place_of(block.address);
  if (!arena || !arena->give_to_all(block.address)) return CUDA_ERROR_INVALID_VALUE;
  pool->sync_memops.erase(block.address);
  trim(*pool, pool->threshold);
  bury_pools();
  return CUDA_SUCCESS;
}

// --- Giving back

void after_wait() {
  if (!are_in_use()) return;
  // Another thread allocates or gives back. This one has only waited, and the driver would not keep
  // it for that: what is too much is given back after the next wait.
  auto& all = pools();
  if (!all.mutex.try_lock()) return;
  (void)collect(Seen::kByProgram);
  for (const auto& pool : all.pools)
    trim(*pool, pool->threshold);
  all.mutex.unlock();
}

void finish_frees() {
  if (!are_in_use()) return;
  const PoolsLock lock;
  (void)collect(Seen::kByAgent);
}

PoolsKept::PoolsKept() { pools().mutex.lock(); }
PoolsKept::~PoolsKept() { pools().mutex.unlock(); }

void trim_pool(CUmemoryPool handle, std::size_t keep) {
  const PoolsLock lock;
  (void)collect(Seen::kByProgram);
  if (auto* pool = pool_of(handle)) trim(*pool, keep);
}

bool give_back_idle(CUdevice device) {
  if (!are_in_use()) return false;
  const PoolsLock lock;
  return give_back_idle_of(device);
}

PoolUse use_of_pool(CUmemoryPool handle) {
  const PoolsLock lock;
  const auto* pool = pool_of(handle);
  if (!pool) return {};
  return {pool->reserved(), pool->reserved_high, pool->used(), pool->used_high};
}

std::vector<StreamId> streams_in(CUcontext context) {
  if (!are_in_use()) return {};
  const PoolsLock lock;
  std::vector<StreamId> found;
  for (const auto& [id, stream] : pools().streams)
    if (stream.context == context) found.push_back(id);
  return found;
}

void forget_work_in(CUcontext context, const std::vector<StreamId>& streams) {
  if (!are_in_use()) return;
  const PoolsLock lock;
  auto& all = pools();
  all.spare_events.erase(context);
  for (const auto id : streams) {
    all.streams.erase(id);
    (void)let_leave(id, all.last_free);
    for (const auto& pool : all.pools)
      note_passed(*pool, id, all.last_free);
  }
}

// A handler of a signal may fork in the middle of anything: nothing is waited for.
void forget_pools_after_fork() { forget(); }

}  // namespace stasis::preload
