#include "pool_store.h"

#include <iterator>
#include <utility>

#include "intercept.h"

namespace stasis::preload::pool_store {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// Never destroyed, as the tables. A forked child has another, as a thread that the child has not
// may have been at work in this one.
std::atomic<Pools*> g_pools{nullptr};
std::atomic<bool> g_in_use{false};

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

Pools& pools() {
  auto* made = g_pools.load(std::memory_order_acquire);
  if (made) return *made;
  auto* fresh = new Pools;
  if (g_pools.compare_exchange_strong(made, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *made;
}

bool are_in_use() { return g_in_use.load(std::memory_order_relaxed); }
void note_in_use() { g_in_use = true; }

void forget() {
  g_in_use = false;
  auto* fresh = new Pools;
  fresh->of_parent = g_pools.exchange(fresh);
}

Pool* pool_of(CUmemoryPool handle) {
  for (const auto& pool : pools().pools)
    if (pool->handle == handle) return pool.get();
  return nullptr;
}

Place place_of(CUdeviceptr pointer) {
  for (const auto& pool : pools().pools)
    if (auto* arena = pool->arena_at(pointer)) return {pool.get(), arena};
  return {};
}

namespace {

// Gives back these units, which are idle.
void release_units(PoolArena& arena, const std::vector<std::size_t>& units) {
  for (const auto unit : units) {
    const auto address = arena.address_of(unit);
    driver().cuMemUnmap(address, PoolArena::kUnit);
    drop_and_release(address, PoolArena::kUnit);
    arena.set_present(unit, false);
  }
}

}  // namespace

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

namespace {

void drop_addresses(const PoolArena& arena) {
  driver().cuMemAddressFree(arena.base(), arena.size());
  const TablesLock lock;
  tables().pool_ranges.erase(arena.base());
}

}  // namespace

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

namespace {

CUevent spare_event(CUcontext context) {
  const PoolsLock lock;
  auto& spare = pools().spare_events[context];
  if (spare.empty()) return nullptr;
  CUevent event = spare.back();
  spare.pop_back();
  return event;
}

}  // namespace

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

namespace {

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
      pools().known[handle] = {device, true, true};
      return device;
    }
  }
  return std::nullopt;
}

}  // namespace

Pool* make_pool(CUmemoryPool handle) {
  const auto device = served_device(handle);
  if (!device || !can_be_served(*device)) return nullptr;
  auto pool = std::make_unique<Pool>();
  pool->handle = handle;
  pool->device = *device;
  read_settings(*pool);
  pools().pools.push_back(std::move(pool));
  note_in_use();
  return pools().pools.back().get();
}

namespace {

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

}  // namespace

CUresult give_rights(CUdeviceptr address, std::size_t size,
                     const std::vector<CUmemAccessDesc>& rights) {
  const auto result = driver().cuMemSetAccess(address, size, rights.data(), rights.size());
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  for (const auto& right : rights)
    enter_access(address, size, right);
  return result;
}

namespace {

// All of them, or none.
CUresult grow(const Pool& pool, PoolArena& arena, const std::vector<std::size_t>& units) {
  std::vector<CUmemAccessDesc> rights = pool.rights;
  rights.push_back(full_right(pool.device));
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

}  // namespace

bool give_back_idle_of(CUdevice device) {
  bool any = collect(Seen::kByAgent);
  for (const auto& pool : pools().pools)
    if (pool->device == device) any = trim(*pool, 0) || any;
  return any;
}

namespace {

CUcontext memory_context(const StreamName& stream) {
  const TablesLock lock;
  return owner_in(stream.context);
}

// Whether so many units are to be had. To try takes a GPU that has less for a while, from others,
// and for nothing.
bool has_room(const Pool& pool, std::size_t units, const StreamName& stream) {
  constexpr std::size_t kFew = 4;
  if (units < kFew) return true;
  std::size_t free = 0;
  std::size_t total = 0;
  const CurrentContext current(memory_context(stream));
  // Only a context says it, of its device.
  if (stream.device == pool.device && driver().cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS)
    return units <= free / PoolArena::kUnit;
  return driver().cuDeviceTotalMem_v2(&total, pool.device) != CUDA_SUCCESS ||
         units <= total / PoolArena::kUnit;
}

}  // namespace

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

std::vector<Behind> others_with_memory(const Pool& pool, StreamId stream) {
  std::vector<Behind> found;
  for (const auto& entry : pools().streams) {
    const StreamId id = entry.first;
    const auto& marks = entry.second.marks;
    const bool has = std::any_of(pool.arenas.begin(), pool.arenas.end(),
                                 [id](const auto& arena) { return arena->has_pending(id); });
    if (id == stream || !has) continue;
    // What it has come past needs no waiting, where the program has forbidden to look.
    Behind behind{id, entry.second.passed, {}};
    // All, since they were recorded before they were entered, in any order.
    for (const auto& mark : marks) {
      behind.last = std::max(behind.last, mark.number);
      behind.events.push_back(mark.event);
    }
    found.push_back(std::move(behind));
  }
  return found;
}

}  // namespace stasis::preload::pool_store
