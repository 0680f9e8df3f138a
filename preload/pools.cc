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
  FreeNumber passed = 0;  // the last that it has come past
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
};

// Never destroyed, as the tables. A forked child has another, as a thread that the child has not
// may have been at work in this one.
std::atomic<Pools*> g_pools{nullptr};

Pools& pools() {
  auto* made = g_pools.load(std::memory_order_acquire);
  if (made) return *made;
  auto* fresh = new Pools;
  if (g_pools.compare_exchange_strong(made, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *made;
}

// Whether there is anything at all to look for: most programs have no pools.
std::atomic<bool> g_in_use{false};

class PoolsLock {
 public:
  PoolsLock() : locked_(pools()) { locked_.mutex.lock(); }
  ~PoolsLock() { locked_.mutex.unlock(); }
  PoolsLock(const PoolsLock&) = delete;
  PoolsLock& operator=(const PoolsLock&) = delete;

 private:
  Pools& locked_;
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

void drop_addresses(const PoolArena& arena) {
  driver().cuMemAddressFree(arena.base(), arena.size());
  const TablesLock lock;
  tables().pool_ranges.erase(arena.base());
}

// Those that the program has destroyed, and that nothing is in any more.
void bury_pools() {
  auto& all = pools().pools;
  std::erase_if(all, [](const std::unique_ptr<Pool>& pool) {
    if (pool->handle || !pool->empty()) return false;
    trim(*pool, 0);
    for (const auto& arena : pool->arenas)
      drop_addresses(*arena);
    return true;
  });
}

// The stream has come so far. True if memory of cuMemAlloc was given back.
bool let_leave(StreamId stream, FreeNumber last) {
  return std::erase_if(pools().leaving, [&](const Leaving& one) {
           const bool due = one.stream == stream && one.number <= last;
           if (due) let_go(one.address, one.allocation);
           return due;
         }) > 0;
}

void note_passed(Pool& pool, StreamId stream, FreeNumber last) {
  for (const auto& arena : pool.arenas)
    arena->passed(stream, last);
}

// What a call has waited for the program knows; what the agent finds out by looking it does not.
enum class Seen { kByProgram, kByAgent };

// Which streams have come past their frees. True if memory of cuMemAlloc was given back.
bool collect(Seen seen) {
  auto& all = pools();
  // To ask of an event would spoil captures, of other threads as well.
  if (tables().captures.load() != 0) return false;
  bool gave_back = false;
  bool all_look = true;
  for (const auto& pool : all.pools)
    all_look = all_look && pool->looks_at_streams;
  for (auto at = all.streams.begin(); at != all.streams.end();) {
    auto& [id, stream] = *at;
    while (!stream.marks.empty()) {
      const Mark first = stream.marks.front();
      const auto result = driver().cuEventQuery(first.event);
      // One that is gone has gone with its context, which was waited for. Anything else that the
      // driver says is no answer: the memory stays.
      const bool gone =
          result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_HANDLE;
      if (result != CUDA_SUCCESS && !gone) break;
      stream.passed = std::max(stream.passed, first.number);
      if (!gone) all.spare_events[stream.context].push_back(first.event);
      stream.marks.pop_front();
    }
    if (stream.passed > 0) {
      gave_back = let_leave(id, stream.passed) || gave_back;
      for (const auto& pool : all.pools)
        if (pool->looks_at_streams || seen == Seen::kByProgram)
          note_passed(*pool, id, stream.passed);
    }
    const bool done = stream.marks.empty() && (all_look || seen == Seen::kByProgram);
    at = done ? all.streams.erase(at) : std::next(at);
  }
  bury_pools();
  return gave_back;
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
  if (event && driver().cuEventRecord(event, stream.handle) == CUDA_SUCCESS) return CUDA_SUCCESS;
  // One that has gone with a context of the same handle is no good.
  if (event) driver().cuEventDestroy_v2(event);
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

int count_devices() {
  int count = 0;
  return driver().cuDeviceGetCount(&count) == CUDA_SUCCESS ? count : 0;
}

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
  if (!call.cuMemPoolGetAccess) return;
  const int devices = count_devices();
  for (CUdevice device = 0; device < devices; ++device) {
    CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (device != pool.device &&
        call.cuMemPoolGetAccess(&flags, pool.handle, &location) == CUDA_SUCCESS &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
      pool.rights.push_back({location, flags});
  }
}

// Which device's pool it is, if the agent can serve it.
std::optional<CUdevice> served_device(CUmemoryPool handle) {
  const auto known = pools().known.find(handle);
  if (known != pools().known.end())
    return known->second.served ? std::optional(known->second.device) : std::nullopt;
  const int devices = count_devices();
  for (CUdevice device = 0; device < devices; ++device) {
    CUmemoryPool its = nullptr;
    if (driver().cuDeviceGetDefaultMemPool(&its, device) == CUDA_SUCCESS && its == handle) {
      pools().known[handle] = {device, true};
      return device;
    }
  }
  return std::nullopt;
}

// Null if the agent cannot serve it.
Pool* make_pool(CUmemoryPool handle) {
  const auto device = served_device(handle);
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

bool give_back_idle_locked(CUdevice device) {
  bool any = collect(Seen::kByAgent);
  for (const auto& pool : pools().pools)
    if (pool->device == device) any = trim(*pool, 0) || any;
  return any;
}

// Whether so many units are to be had. To try takes a GPU that has less for a while, from others,
// and for nothing.
bool has_room(const Pool& pool, std::size_t units, const StreamName& stream) {
  constexpr std::size_t kFew = 4;
  if (units < kFew) return true;
  std::size_t free = 0;
  std::size_t total = 0;
  const CurrentContext current(stream.context);
  // Only a context says it, of its device.
  if (stream.device == pool.device && driver().cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS)
    return units <= free / PoolArena::kUnit;
  return driver().cuDeviceTotalMem_v2(&total, pool.device) != CUDA_SUCCESS ||
         units <= total / PoolArena::kUnit;
}

// An allocation in memory that is there, or in more.
CUdeviceptr settle(Pool& pool, std::size_t bytes, const StreamName& stream, bool may_grow) {
  const auto place_in = [&](PoolArena& arena) -> CUdeviceptr {
    const auto fit = arena.find(bytes, stream.id, may_grow);
    if (!fit) return 0;
    if (!fit->missing.empty() && (!has_room(pool, fit->missing.size(), stream) ||
                                  grow(pool, arena, fit->missing) != CUDA_SUCCESS))
      return 0;
    arena.take(fit->address, bytes);
    pool.note_highs();
    return fit->address;
  };
  bool had_addresses = false;
  for (const auto& arena : pool.arenas) {
    if (const auto found = place_in(*arena)) return found;
    had_addresses = had_addresses || (may_grow && arena->find(bytes, stream.id, true));
  }
  // Where there were addresses it is memory that was wanting.
  if (!may_grow || had_addresses) return 0;
  auto* more = add_arena(pool, bytes);
  if (!more) return 0;
  if (const auto found = place_in(*more)) return found;
  drop_addresses(*more);
  pool.arenas.pop_back();
  return 0;
}

// Events behind all that was freed so far in another stream, of this pool.
struct Behind {
  StreamId stream = 0;
  FreeNumber last = 0;
  std::vector<CUevent> events;
};

std::vector<Behind> others_with_memory(const Pool& pool, StreamId stream) {
  std::vector<Behind> found;
  for (const auto& entry : pools().streams) {
    const StreamId id = entry.first;
    const auto& marks = entry.second.marks;
    const bool has = std::any_of(pool.arenas.begin(), pool.arenas.end(),
                                 [id](const auto& arena) { return arena->has_pending(id); });
    if (id == stream || marks.empty() || !has) continue;
    Behind behind{id, 0, {}};
    // All, since they were recorded before they were entered, in any order.
    for (const auto& mark : marks) {
      behind.last = std::max(behind.last, mark.number);
      behind.events.push_back(mark.event);
    }
    found.push_back(std::move(behind));
  }
  return found;
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

PoolEnd::PoolEnd(CUmemoryPool handle) : handle_(handle) {
  const PoolsLock lock;
  if (const auto known = pools().known.extract(handle)) {
    was_known_ = true;
    device_ = known.mapped().device;
    served_ = known.mapped().served;
  }
  auto* pool = pool_of(handle);
  if (!pool) return;
  pool->handle = nullptr;
  pool_ = pool;
}

void PoolEnd::happened() {
  const PoolsLock lock;
  (void)collect(Seen::kByAgent);
}

void PoolEnd::did_not_happen() {
  const PoolsLock lock;
  if (was_known_) pools().known[handle_] = {device_, served_};
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

void note_pool_access(CUmemoryPool handle, const CUmemAccessDesc* rights, std::size_t count) {
  const PoolsLock lock;
  // One that is made later asks the driver.
  auto* pool = pool_of(handle);
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
  std::vector<Behind> others;
  {
    const PoolsLock lock;
    auto* pool = pool_of(handle);
    if (!pool) pool = make_pool(handle);
    // More than any GPU has.
    constexpr std::size_t kMost = std::size_t{1} << 45;
    if (!pool || bytes > kMost) return 0;
    if (const auto found = settle(*pool, bytes, stream, false)) return found;
    if (pool->looks_at_streams) {
      (void)collect(Seen::kByAgent);
      if (const auto found = settle(*pool, bytes, stream, false)) return found;
    }
    if (const auto grown = settle(*pool, bytes, stream, true)) return grown;
    // The GPU is full, or all addresses are taken.
    if (give_back_idle_locked(pool->device))
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
  if (pools().streams[stream.id].marks.size() > kMany) (void)collect(Seen::kByAgent);
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
  if (!g_in_use.load(std::memory_order_relaxed)) return;
  const PoolsLock lock;
  (void)collect(Seen::kByProgram);
  for (const auto& pool : pools().pools)
    trim(*pool, pool->threshold);
}

void finish_frees() {
  if (!g_in_use.load(std::memory_order_relaxed)) return;
  const PoolsLock lock;
  (void)collect(Seen::kByAgent);
}

PoolsKept::PoolsKept() : kept_(g_in_use.load(std::memory_order_relaxed)) {
  if (kept_) pools().mutex.lock();
}
PoolsKept::~PoolsKept() {
  if (kept_) pools().mutex.unlock();
}

void trim_pool(CUmemoryPool handle, std::size_t keep) {
  const PoolsLock lock;
  (void)collect(Seen::kByProgram);
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
    (void)let_leave(id, all.last_free);
    for (const auto& pool : all.pools)
      note_passed(*pool, id, all.last_free);
  }
}

// A handler of a signal may fork in the middle of anything: nothing is waited for.
void forget_pools_after_fork() {
  g_in_use = false;
  g_pools = new Pools;
}

}  // namespace stasis::preload
