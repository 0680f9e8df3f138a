#include "pools.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "eviction_internal.h"
#include "intercept.h"
#include "pool_arena.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

struct Pool {
  CUmemoryPool handle = nullptr;  // null once the program has destroyed it
  CUdevice device = 0;
  // Each twice as large as what was needed when it was made: addresses cost time each time that
  // the maps of the process are read, as by CRIU.
  std::vector<std::unique_ptr<PoolArena>> arenas;
  std::vector<CUmemAccessDesc> rights;  // of other devices
  std::set<CUdeviceptr> sync_memops;    // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
  std::uint64_t threshold = 0;
  bool looks_at_streams = true;    // CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
  bool makes_streams_wait = true;  // CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
  std::uint64_t reserved_high = 0;
  std::uint64_t used_high = 0;

  std::uint64_t reserved() const {
    std::uint64_t sum = 0;
    for (const auto& arena : arenas)
      sum += arena->reserved();
    return sum;
  }
  std::uint64_t used() const {
    std::uint64_t sum = 0;
    for (const auto& arena : arenas)
      sum += arena->used();
    return sum;
  }
  bool empty() const {
    return std::all_of(arenas.begin(), arenas.end(), [](const auto& one) { return one->empty(); });
  }
  PoolArena* arena_at(CUdeviceptr pointer) const {
    for (const auto& arena : arenas)
      if (arena->covers(pointer)) return arena.get();
    return nullptr;
  }
  void note_highs() {
    reserved_high = std::max(reserved_high, reserved());
    used_high = std::max(used_high, used());
  }
};

// A place in a stream behind a free.
struct Mark {
  FreeNumber number = 0;
  CUevent event = nullptr;
};

// What the streams of a context had to do; the events go with the context.
struct Stream {
  CUcontext context = nullptr;
  std::deque<Mark> marks;
};

// Of cuMemAlloc, freed in a stream.
struct Leaving {
  StreamId stream = 0;
  FreeNumber number = 0;
  CUdeviceptr address = 0;
  Allocation allocation;
};

// What the program has made, and the agent serves.
struct Known {
  CUdevice device = 0;
  bool served = false;
};

struct Pools {
  // Taken before that of the tables. Held over calls of the driver: another thread that allocates
  // from a pool would have to wait for the same.
  OwnedMutex mutex;
  std::vector<std::unique_ptr<Pool>> pools;
  std::map<CUmemoryPool, Known> known;
  std::map<StreamId, Stream> streams;
  std::map<CUcontext, std::vector<CUevent>> spare_events;
  std::vector<Leaving> leaving;
  FreeNumber last_free = 0;
  bool to_be_forgotten = false;
};

Pools& pools() {
  // Never destroyed, as the tables.
  static auto* made = new Pools;
  return *made;
}

// Whether there is anything at all to look for: most programs have no pools.
std::atomic<bool> g_in_use{false};

void forget_pools() {
  auto& all = pools();
  all.to_be_forgotten = false;
  all.pools.clear();
  all.known.clear();
  all.streams.clear();
  all.spare_events.clear();
  all.leaving.clear();
  g_in_use = false;
}

class PoolsLock {
 public:
  PoolsLock() { pools().mutex.lock(); }
  ~PoolsLock() { unlock(); }
  PoolsLock(const PoolsLock&) = delete;
  PoolsLock& operator=(const PoolsLock&) = delete;
  static void unlock() {
    if (pools().to_be_forgotten) [[unlikely]]
      forget_pools();
    pools().mutex.unlock();
  }
};

// --- With the pools locked

Pool* pool_of(CUmemoryPool handle) {
  for (const auto& pool : pools().pools)
    if (pool->handle == handle) return pool.get();
  return nullptr;
}

struct Place {
  Pool* pool = nullptr;
  PoolArena* arena = nullptr;
};

// Nothing where no pool of the agent's is.
Place place_of(CUdeviceptr pointer) {
  for (const auto& pool : pools().pools)
    if (auto* arena = pool->arena_at(pointer)) return {pool.get(), arena};
  return {};
}

// Gives back these units, which are idle.
void release_units(PoolArena& arena, const std::vector<std::size_t>& units) {
  for (const auto unit : units) {
    const auto address = arena.address_of(unit);
    driver().cuMemUnmap(address, PoolArena::kUnit);
    drop_and_release(address, PoolArena::kUnit);
    arena.set_present(unit, false);
  }
}

// Down to `keep` bytes. True if anything was given back.
bool trim(Pool& pool, std::uint64_t keep) {
  bool any = false;
  for (auto at = pool.arenas.rbegin(); at != pool.arenas.rend(); ++at) {
    const auto reserved = pool.reserved();
    if (keep > reserved || reserved - keep < PoolArena::kUnit) break;
    auto idle = (*at)->idle();
    const auto too_much = (reserved - keep) / PoolArena::kUnit;
    if (idle.size() > too_much) idle.resize(too_much);
    release_units(**at, idle);
    any = any || !idle.empty();
  }
  return any;
}

// Those that the program has destroyed, and that nothing is in any more.
void bury_pools() {
  auto& all = pools().pools;
  std::erase_if(all, [](const std::unique_ptr<Pool>& pool) {
    if (pool->handle || !pool->empty()) return false;
    trim(*pool, 0);
    for (const auto& arena : pool->arenas) {
      driver().cuMemAddressFree(arena->base(), arena->size());
      const TablesLock lock;
      tables().pool_ranges.erase(arena->base());
    }
    return true;
  });
}

// The stream has come so far.
void note_passed(StreamId stream, FreeNumber last) {
  for (const auto& pool : pools().pools)
    for (const auto& arena : pool->arenas)
      arena->passed(stream, last);
  std::erase_if(pools().leaving, [&](const Leaving& one) {
    const bool due = one.stream == stream && one.number <= last;
    if (due) let_go(one.address, one.allocation);
    return due;
  });
}

// Which streams have come past their frees. A driver that says anything but that it is not done
// will not say more later.
void collect() {
  auto& all = pools();
  for (auto at = all.streams.begin(); at != all.streams.end();) {
    auto& [id, stream] = *at;
    FreeNumber last = 0;
    while (!stream.marks.empty() &&
           driver().cuEventQuery(stream.marks.front().event) != CUDA_ERROR_NOT_READY) {
      last = std::max(last, stream.marks.front().number);
      all.spare_events[stream.context].push_back(stream.marks.front().event);
      stream.marks.pop_front();
    }
    if (last > 0) note_passed(id, last);
    at = stream.marks.empty() ? all.streams.erase(at) : std::next(at);
  }
  bury_pools();
}

// --- A place in a stream

CUevent spare_event(CUcontext context) {
  const PoolsLock lock;
  auto& spare = pools().spare_events[context];
  if (spare.empty()) return nullptr;
  CUevent event = spare.back();
  spare.pop_back();
  return event;
}

// Without the lock: the driver may have to wait until the stream takes more.
CUresult mark(const StreamName& stream, CUevent& event) {
  const CurrentContext current(stream.context);
  event = spare_event(stream.context);
  // One that has gone with a context of the same handle is no good.
  if (event && driver().cuEventRecord(event, stream.handle) == CUDA_SUCCESS) return CUDA_SUCCESS;
  auto result = driver().cuEventCreate(&event, kDisableTiming);
  if (result != CUDA_SUCCESS) return result;
  result = driver().cuEventRecord(event, stream.handle);
  if (result != CUDA_SUCCESS) driver().cuEventDestroy_v2(event);
  return result;
}

FreeNumber enter_mark(const StreamName& stream, CUevent event) {
  auto& all = pools();
  auto& its = all.streams[stream.id];
  its.context = stream.context;
  its.marks.push_back({++all.last_free, event});
  return all.last_free;
}

// --- Growing

// The driver's settings of it.
void read_settings(Pool& pool) {
  const auto& call = driver();
  int flag = 1;
  if (call.cuMemPoolGetAttribute(pool.handle, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &flag) ==
      CUDA_SUCCESS)
    pool.looks_at_streams = flag != 0;
  if (call.cuMemPoolGetAttribute(pool.handle, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
                                 &flag) == CUDA_SUCCESS)
    pool.makes_streams_wait = flag != 0;
  call.cuMemPoolGetAttribute(pool.handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &pool.threshold);
}

// Which device's pool it is, if the agent can serve it.
std::optional<CUdevice> served_device(CUmemoryPool handle, CUdevice current) {
  const auto known = pools().known.find(handle);
  if (known != pools().known.end())
    return known->second.served ? std::optional(known->second.device) : std::nullopt;
  std::vector<CUdevice> devices{current};
  {
    const TablesLock lock;
    for (const auto& [context, device] : tables().contexts)
      devices.push_back(device);
  }
  for (const auto device : devices) {
    CUmemoryPool its = nullptr;
    if (driver().cuDeviceGetDefaultMemPool(&its, device) == CUDA_SUCCESS && its == handle) {
      pools().known[handle] = {device, true};
      return device;
    }
  }
  return std::nullopt;
}

// Null if the agent cannot serve it.
Pool* make_pool(CUmemoryPool handle, CUdevice current) {
  const auto device = served_device(handle, current);
  if (!device || !can_be_served(*device)) return nullptr;
  auto pool = std::make_unique<Pool>();
  pool->handle = handle;
  pool->device = *device;
  read_settings(*pool);
  pools().pools.push_back(std::move(pool));
  g_in_use = true;
  return pools().pools.back().get();
}

// More addresses, for `bytes` at least. Null if there are none to be had.
PoolArena* add_arena(Pool& pool, std::size_t bytes) {
  constexpr std::size_t kFirst = 32;  // units
  const std::size_t needed = (bytes + PoolArena::kUnit - 1) / PoolArena::kUnit;
  std::size_t so_far = 0;
  for (const auto& arena : pool.arenas)
    so_far += arena->size() / PoolArena::kUnit;
  for (const auto units : {std::max({2 * needed, so_far, kFirst}), needed}) {
    CUdeviceptr base = 0;
    if (driver().cuMemAddressReserve(&base, units * PoolArena::kUnit, 0, 0, 0) != CUDA_SUCCESS)
      continue;
    pool.arenas.push_back(std::make_unique<PoolArena>(base, units));
    const TablesLock lock;
    tables().pool_ranges[base] = units * PoolArena::kUnit;
    return pool.arenas.back().get();
  }
  return nullptr;
}

// Memory behind the unit. Not yet accessible.
CUresult fill_unit(CUdevice device, CUdeviceptr address) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  CUmemGenericAllocationHandle real = 0;
  auto result = driver().cuMemCreate(&real, PoolArena::kUnit, &prop, 0);
  if (result != CUDA_SUCCESS) return result;
  result = driver().cuMemMap(address, PoolArena::kUnit, 0, real, 0);
  if (result != CUDA_SUCCESS) {
    driver().cuMemRelease(real);
    return result;
  }
  const TablesLock lock;
  auto* physical = enter_physical(MemoryOrigin::kServed, real, PoolArena::kUnit, prop, 0);
  physical->mappings = 1;
  tables().mappings.insert_or_assign(address, Mapping{address, PoolArena::kUnit, 0, physical, {}});
  return CUDA_SUCCESS;
}

CUresult give_rights(CUdeviceptr address, std::size_t size,
                     const std::vector<CUmemAccessDesc>& rights) {
  const auto result = driver().cuMemSetAccess(address, size, rights.data(), rights.size());
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  for (const auto& right : rights)
    enter_access(address, size, right);
  return result;
}

// All of them, or none.
CUresult grow(const Pool& pool, PoolArena& arena, const std::vector<std::size_t>& units) {
  std::vector<CUmemAccessDesc> rights = pool.rights;
  rights.push_back(
      {{CU_MEM_LOCATION_TYPE_DEVICE, pool.device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  CUresult result = CUDA_SUCCESS;
  std::size_t done = 0;
  for (; done < units.size() && result == CUDA_SUCCESS; ++done)
    result = fill_unit(pool.device, arena.address_of(units[done]));
  if (result != CUDA_SUCCESS) --done;
  // Units side by side get their rights in one call, which costs as much as for one.
  for (std::size_t i = 0; i < units.size() && result == CUDA_SUCCESS;) {
    std::size_t behind = i + 1;
    while (behind < units.size() && units[behind] == units[behind - 1] + 1)
      ++behind;
    result = give_rights(arena.address_of(units[i]), (behind - i) * PoolArena::kUnit, rights);
    i = behind;
  }
  for (std::size_t i = 0; i < done; ++i)
    arena.set_present(units[i], true);
  if (result != CUDA_SUCCESS)
    release_units(arena, {units.begin(), units.begin() + static_cast<std::ptrdiff_t>(done)});
  return result;
}

// All other streams' frees become this stream's, which from now on waits for them.
void wait_for_others(Pool& pool, const StreamName& stream) {
  const CurrentContext current(stream.context);
  std::vector<StreamId> others;
  for (const auto& [id, its] : pools().streams) {
    if (id == stream.id || its.marks.empty()) continue;
    if (driver().cuStreamWaitEvent(stream.handle, its.marks.back().event, 0) == CUDA_SUCCESS)
      others.push_back(id);
  }
  CUevent event = nullptr;
  if (others.empty() || driver().cuEventCreate(&event, kDisableTiming) != CUDA_SUCCESS) return;
  if (driver().cuEventRecord(event, stream.handle) != CUDA_SUCCESS) {
    driver().cuEventDestroy_v2(event);
    return;
  }
  const auto number = enter_mark(stream, event);
  for (const auto id : others)
    for (const auto& arena : pool.arenas)
      arena->hand_over(id, stream.id, number);
}

bool give_back_idle_locked(CUdevice device) {
  collect();
  bool any = false;
  for (const auto& pool : pools().pools)
    if (pool->device == device) any = trim(*pool, 0) || any;
  return any;
}

// An allocation in memory that is there, or in more.
CUdeviceptr settle(Pool& pool, std::size_t bytes, StreamId stream, bool may_grow) {
  const auto place_in = [&](PoolArena& arena) -> CUdeviceptr {
    const auto fit = arena.find(bytes, stream, may_grow);
    if (!fit || (!fit->missing.empty() && grow(pool, arena, fit->missing) != CUDA_SUCCESS))
      return 0;
    arena.take(fit->address, bytes);
    pool.note_highs();
    return fit->address;
  };
  bool had_addresses = false;
  for (const auto& arena : pool.arenas) {
    if (const auto found = place_in(*arena)) return found;
    had_addresses = had_addresses || (may_grow && arena->find(bytes, stream, true));
  }
  // Where there were addresses it is memory that was wanting.
  if (!may_grow || had_addresses) return 0;
  auto* more = add_arena(pool, bytes);
  return more ? place_in(*more) : 0;
}

}  // namespace

// --- Names

std::optional<StreamName> name_of(CUstream stream, bool per_thread) {
  const auto& call = driver();
  StreamName name;
  name.handle = stream ? stream : per_thread ? kStreamPerThread : kStreamLegacy;
  name.context = context_of(name.handle == kStreamLegacy ? nullptr : name.handle);
  if (!name.context || !call.cuStreamGetId ||
      call.cuStreamGetId(name.handle, &name.id) != CUDA_SUCCESS)
    return std::nullopt;
  {
    const TablesLock lock;
    const auto at = tables().contexts.find(owner_in(name.context));
    if (at != tables().contexts.end()) {
      name.device = at->second;
      return name;
    }
  }
  const CurrentContext current(name.context);
  if (call.cuCtxGetDevice(&name.device) != CUDA_SUCCESS) return std::nullopt;
  const TablesLock lock;
  tables().contexts.emplace(owner_in(name.context), name.device);
  return name;
}

void note_pool(CUmemoryPool pool, const CUmemPoolProps& props) {
  const bool served = props.allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
                      props.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                      props.handleTypes == CU_MEM_HANDLE_TYPE_NONE && props.maxSize == 0 &&
                      props.usage == 0;
  const PoolsLock lock;
  pools().known[pool] = {props.location.id, served};
}

void note_pool_destroyed(CUmemoryPool handle) {
  const PoolsLock lock;
  pools().known.erase(handle);
  auto* pool = pool_of(handle);
  if (!pool) return;
  pool->handle = nullptr;
  collect();
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

void note_pool_access(CUmemoryPool handle, const CUmemAccessDesc* rights, std::size_t count) {
  const PoolsLock lock;
  const auto known = pools().known.find(handle);
  auto* pool = pool_of(handle);
  // There has to be one to note it in.
  if (!pool) pool = make_pool(handle, known == pools().known.end() ? 0 : known->second.device);
  if (!pool) return;
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
    for (const auto address : present)
      give_rights(address, PoolArena::kUnit, {right});
  }
}

// --- Allocating and freeing

CUdeviceptr allocate_from_pool(CUmemoryPool handle, std::size_t bytes, const StreamName& stream) {
  const PoolsLock lock;
  auto* pool = pool_of(handle);
  if (!pool) pool = make_pool(handle, stream.device);
  // More than any GPU has.
  constexpr std::size_t kMost = std::size_t{1} << 45;
  if (!pool || bytes > kMost) return 0;
  if (const auto found = settle(*pool, bytes, stream.id, false)) return found;
  if (pool->looks_at_streams) {
    collect();
    if (const auto found = settle(*pool, bytes, stream.id, false)) return found;
  }
  if (const auto grown = settle(*pool, bytes, stream.id, true)) return grown;
  // The GPU is full, or all addresses are taken.
  if (give_back_idle_locked(pool->device))
    if (const auto grown = settle(*pool, bytes, stream.id, true)) return grown;
  if (!pool->makes_streams_wait) return 0;
  wait_for_others(*pool, stream);
  if (const auto found = settle(*pool, bytes, stream.id, false)) return found;
  return settle(*pool, bytes, stream.id, true);
}

bool in_pool(CUdeviceptr pointer) {
  if (!g_in_use.load(std::memory_order_relaxed)) return false;
  const TablesLock lock;
  const auto& ranges = tables().pool_ranges;
  const auto next = ranges.upper_bound(pointer);
  return next != ranges.begin() && pointer - std::prev(next)->first < std::prev(next)->second;
}

std::optional<PoolBlock> pool_block_at(CUdeviceptr pointer) {
  if (!g_in_use.load(std::memory_order_relaxed)) return std::nullopt;
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
  if (pools().streams[stream.id].marks.size() > kMany) collect();
  // Another thread has freed it meanwhile: the program's mistake.
  return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult free_when_passed(CUdeviceptr address, const Allocation& allocation,
                          const StreamName& stream) {
  CUevent event = nullptr;
  if (const auto result = mark(stream, event); result != CUDA_SUCCESS) return result;
  const PoolsLock lock;
  g_in_use = true;
  pools().leaving.push_back({stream.id, enter_mark(stream, event), address, allocation});
  collect();
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
  if (!g_in_use.load(std::memory_order_relaxed)) return;
  const PoolsLock lock;
  collect();
  for (const auto& pool : pools().pools)
    trim(*pool, pool->threshold);
}

void trim_pool(CUmemoryPool handle, std::size_t keep) {
  const PoolsLock lock;
  collect();
  if (auto* pool = pool_of(handle)) trim(*pool, keep);
}

bool give_back_idle(CUdevice device) {
  if (!g_in_use.load(std::memory_order_relaxed)) return false;
  const PoolsLock lock;
  return give_back_idle_locked(device);
}

PoolUse use_of_pool(CUmemoryPool handle) {
  const PoolsLock lock;
  const auto* pool = pool_of(handle);
  if (!pool) return {};
  return {pool->reserved(), pool->reserved_high, pool->used(), pool->used_high};
}

std::vector<StreamId> streams_in(CUcontext context) {
  if (!g_in_use.load(std::memory_order_relaxed)) return {};
  const PoolsLock lock;
  std::vector<StreamId> found;
  for (const auto& [id, stream] : pools().streams)
    if (stream.context == context) found.push_back(id);
  return found;
}

void forget_work_in(CUcontext context, const std::vector<StreamId>& streams) {
  if (!g_in_use.load(std::memory_order_relaxed)) return;
  const PoolsLock lock;
  auto& all = pools();
  all.spare_events.erase(context);
  for (const auto id : streams) {
    all.streams.erase(id);
    note_passed(id, all.last_free);
  }
}

// --- Forks

namespace {

bool g_pools_locked_for_fork = false;

}  // namespace

void lock_pools_for_fork() {
  const bool interrupted = pools().mutex.is_mine();
  if (!interrupted) pools().mutex.lock();
  g_pools_locked_for_fork = !interrupted;
}

void unlock_pools_after_fork() {
  if (g_pools_locked_for_fork) PoolsLock::unlock();
}

void forget_pools_after_fork() {
  if (pools().mutex.is_mine())
    pools().to_be_forgotten = true;
  else
    forget_pools();
}

}  // namespace stasis::preload
