// cuMemAlloc and what goes with it, served from virtual memory management.
//
// What the program sees is to be as with the driver's own (580.159.04 on an H100, measured): the
// same granularity of 2 MiB and the same time per allocation, addresses and sizes of a range as
// they were asked for, frees from any context and from none, errors in the middle of a capture.
// What the program asks of such memory afterwards: hook_pointer.cc. Long because an allocation,
// large or small, and its free share the ranges and their lock.
#include <algorithm>
#include <optional>

#include "activation.h"
#include "agent.h"
#include "eviction_internal.h"
#include "gate.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "managed.h"
#include "pools.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// From here on the driver's own allocations take whole units of 2 MiB as well, so nothing is wasted
// (64 of 2 MiB + 4 KiB: 256 MiB either way).
constexpr std::size_t kThreshold = std::size_t{2} << 20;

struct DeviceTraits {
  bool usable = false;
  bool rdma = false;
  // Whether the driver takes CU_MEM_CREATE_USAGE_HW_DECOMPRESS. What cuMemAlloc gives can always be
  // decompressed into by the GPU's own unit, as far as there is one; what cuMemCreate gives has to
  // be asked for (CUDA's documentation of cuMemBatchDecompressAsync).
  bool decompression = true;
  std::size_t granularity = 0;
};

DeviceTraits probe(CUdevice device) {
  DeviceTraits traits;
  int vmm = 0;
  int fds = 0;
  int rdma = 0;
  const auto& call = driver();
  if (call.cuDeviceGetAttribute(&vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                device) != CUDA_SUCCESS ||
      call.cuDeviceGetAttribute(&fds,
                                CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                device) != CUDA_SUCCESS)
    return traits;
  call.cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                            device);
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  if (call.cuMemGetAllocationGranularity(&traits.granularity, &prop,
                                         CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS)
    return traits;
  traits.usable = vmm && fds && traits.granularity;
  traits.rdma = rdma;
  return traits;
}

std::map<CUdevice, DeviceTraits>& known_traits() {
  static auto* known = new std::map<CUdevice, DeviceTraits>;
  return *known;
}

DeviceTraits traits_of(CUdevice device) {
  {
    const TablesLock lock;
    const auto at = known_traits().find(device);
    if (at != known_traits().end()) return at->second;
  }
  const auto traits = probe(device);
  const TablesLock lock;
  return known_traits().emplace(device, traits).first->second;
}

// As the memory of cuMemAlloc is, where this driver can.
CUresult create(CUmemGenericAllocationHandle* real, std::size_t size, CUmemAllocationProp& prop,
                const DeviceTraits& traits) {
  prop.allocFlags.gpuDirectRDMACapable = traits.rdma ? 1 : 0;
  prop.allocFlags.usage = traits.decompression ? kMemCreateUsageHwDecompress : 0;
  const auto result = driver().cuMemCreate(real, size, &prop, 0);
  const bool unknown = result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED;
  if (!traits.decompression || !unknown) return result;
  prop.allocFlags.usage = 0;
  const auto without = driver().cuMemCreate(real, size, &prop, 0);
  if (without != CUDA_SUCCESS) return without;
  const TablesLock lock;
  known_traits()[prop.location.id].decompression = false;
  return without;
}

void keep_spare(CUcontext context, CUdeviceptr spare) {
  const TablesLock lock;
  tables().spares[owner_in(context)].push_back(spare);
}

CUdeviceptr take_spare(CUcontext context) {
  const TablesLock lock;
  const auto at = tables().spares.find(owner_in(context));
  if (at == tables().spares.end() || at->second.empty()) return 0;
  const auto spare = at->second.back();
  at->second.pop_back();
  return spare;
}

// While a stream is captured the driver refuses to allocate or free, unless the thread has said
// that it knows what it does; and the refusal spoils the capture. Only the driver can tell.
CUresult ask_driver_about_capture(CUcontext context) {
  if (tables().captures.load(std::memory_order_relaxed) == 0) return CUDA_SUCCESS;
  CUdeviceptr probe = 0;
  const auto result = driver().cuMemAlloc_v2(&probe, 1);
  if (result == CUDA_SUCCESS) keep_spare(context, probe);
  return result;
}

// By freeing a byte of the driver's own, which waits for work in flight and is refused during a
// capture as the program expects it of its own free. To synchronise the context spoils captures of
// other threads, and may crash beside one that begins (580.159.04).
CUresult wait_for_work(CUcontext context) {
  const auto free = [&](CUdeviceptr byte) {
    const auto result = driver().cuMemFree_v2(byte);
    // Refused, it is there for the next.
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE) keep_spare(context, byte);
    return result;
  };
  if (const auto spare = take_spare(context)) {
    const auto result = free(spare);
    // Unless it has gone with a context of the same number.
    if (result != CUDA_ERROR_INVALID_VALUE) return result;
  }
  const CurrentContext current(context);
  CUdeviceptr byte = 0;
  const auto result = driver().cuMemAlloc_v2(&byte, 1);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return driver().cuCtxSynchronize();
  return result == CUDA_SUCCESS ? free(byte) : result;
}

// Nothing of it is in a table any more.
void let_unit_go(CUdeviceptr unit, std::size_t size) {
  driver().cuMemUnmap(unit, size);
  drop_and_release(unit, size);
  driver().cuMemAddressFree(unit, size);
}

// A unit goes with the last piece in it, as the driver's do.
void leave_unit(CUdeviceptr address, const Allocation& allocation, const InUnit& place) {
  std::size_t size = 0;
  {
    const TablesLock lock;
    const auto unit = tables().small.units.find(place.unit);
    // It may have gone with its context, and another be there.
    if (unit == tables().small.units.end() || unit->second.number > allocation.number) return;
    const auto memory = tables().small.memory.find({unit->second.context, unit->second.life});
    const bool is_last = memory->second.give(address, allocation.asked);
    if (!is_last && place.is_outside) look_outside_again(*unit);
    if (!is_last) return;
    size = unit->second.size;
    forget_places_in(*unit);
    tables().small.units.erase(unit);
  }
  let_unit_go(place.unit, size);
}

}  // namespace

void let_go(CUdeviceptr address, const Allocation& allocation) {
  if (const auto* place = allocation.in_unit()) {
    leave_unit(address, allocation, *place);
    return;
  }
  driver().cuMemUnmap(address, allocation.reserved);
  drop_and_release(address, allocation.reserved);
  driver().cuMemAddressFree(address, allocation.reserved);
  if (const auto* opening = allocation.opening()) end_connection(*opening);
}

bool can_be_served(CUdevice device) { return traits_of(device).usable; }

std::vector<CUmemAccessDesc> rights_of_peers(CUcontext context) {
  std::vector<CUmemAccessDesc> rights;
  const TablesLock lock;
  for (const auto& peer : tables().contexts.peers)
    if (peer.owner == owner_in(context)) rights.push_back(full_right(peer.device));
  return rights;
}

CUresult make_served(CUdevice device, Served& made) {
  const auto traits = traits_of(device);
  if (!traits.usable) return CUDA_ERROR_NOT_SUPPORTED;
  made.rights = rights_of_peers(made.context);
  made.rights.insert(made.rights.begin(), full_right(device));
  made.size = (made.asked + traits.granularity - 1) / traits.granularity * traits.granularity;
  made.prop = {};
  made.prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  made.prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  made.prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return create(&made.real, made.size, made.prop, traits);
}

bool map_served(const Served& made) {
  const auto& call = driver();
  if (call.cuMemMap(made.address, made.size, 0, made.real, 0) == CUDA_SUCCESS) {
    if (call.cuMemSetAccess(made.address, made.size, made.rights.data(), made.rights.size()) ==
        CUDA_SUCCESS)
      return true;
    call.cuMemUnmap(made.address, made.size);
  }
  call.cuMemAddressFree(made.address, made.size);
  return false;
}

namespace {

// `enter` says, with the tables locked, what it is to the program.
template <class Enter>
void enter_served(const Served& mapped, Enter enter) {
  std::vector<CUmemAccessDesc> late;
  {
    const TablesLock lock;
    auto* physical =
        enter_physical(MemoryOrigin::kServed, mapped.real, mapped.size, mapped.prop, 0);
    physical->mappings = 1;
    tables().mappings.insert_or_assign(mapped.address,
                                       Mapping{mapped.address, mapped.size, 0, physical, {}});
    for (const auto& right : mapped.rights)
      enter_access(mapped.address, mapped.size, right);
    enter(physical);
    tables().contexts.devices.emplace(mapped.context, mapped.prop.location.id);
    // Peer access that another thread has enabled meanwhile: it did not find this one yet.
    for (const auto& peer : tables().contexts.peers) {
      const auto known = [&](const CUmemAccessDesc& right) {
        return right.location.id == peer.device;
      };
      if (peer.owner == mapped.context &&
          std::none_of(mapped.rights.begin(), mapped.rights.end(), known))
        late.push_back(full_right(peer.device));
    }
  }
  for (const auto& right : late) {
    if (driver().cuMemSetAccess(mapped.address, mapped.size, &right, 1) != CUDA_SUCCESS) continue;
    const TablesLock lock;
    enter_access(mapped.address, mapped.size, right);
  }
}

}  // namespace

void enter_served(const Served& mapped) {
  enter_served(mapped, [&](Physical* physical) {
    tables().allocations.insert_or_assign(
        mapped.address, Allocation{mapped.asked, mapped.size, mapped.context, physical});
  });
}

namespace {

// `context` owns it. Nothing if it could not be had this way.
std::optional<Served> make_and_map(CUcontext context, CUdevice device, std::size_t asked) {
  const auto& call = driver();
  Served made{context, asked};
  if (make_served(device, made) != CUDA_SUCCESS) return std::nullopt;
  if (call.cuMemAddressReserve(&made.address, made.size, 0, 0, 0) == CUDA_SUCCESS &&
      map_served(made))
    return made;
  call.cuMemRelease(made.real);
  return std::nullopt;
}

CUcontext owner_of_memory_in(CUcontext context) {
  const TablesLock lock;
  return owner_in(context);
}

// Null if it could not be had this way.
CUdeviceptr allocate_large(CUcontext context, CUdevice device, std::size_t asked) {
  context = owner_of_memory_in(context);
  const auto mapped = make_and_map(context, device, asked);
  if (!mapped) return 0;
  enter_served(*mapped);
  return mapped->address;
}

// With the tables locked. In the unit that begins at `unit`.
void enter_small(CUdeviceptr address, CUdeviceptr unit, CUcontext context, std::size_t asked) {
  tables().allocations.insert_or_assign(
      address, Allocation{asked, SmallMemory::room_for(asked), context, mapping_at(unit)->physical,
                          InUnit{unit}});
}

// In a unit that is there. `context` owns it.
CUdeviceptr place_small(CUcontext context, std::size_t asked) {
  const TablesLock lock;
  const auto memory = tables().small.memory.find({context, life_of(context)});
  const auto address = memory == tables().small.memory.end() ? 0 : memory->second.take(asked);
  if (!address) return 0;
  enter_small(address, std::prev(tables().small.units.upper_bound(address))->first, context, asked);
  return address;
}

// Of the context that is current, which `context` owns the memory of.
void anchor(CUcontext context) {
  const auto has_anchor = [&] {
    return tables().small.anchors.contains({context, life_of(context)});
  };
  {
    const TablesLock lock;
    if (has_anchor()) return;
  }
  CUdeviceptr byte = 0;
  // Without it frees take longer.
  if (driver().cuMemAlloc_v2(&byte, 1) != CUDA_SUCCESS) return;
  const TablesLock lock;
  const std::pair key(context, life_of(context));
  const bool is_wanted = tables().small.memory.contains(key) && !has_anchor();
  if (is_wanted)
    tables().small.anchors.emplace(key, byte);
  else
    tables().spares[context].push_back(byte);
}

CUdeviceptr allocate_small(CUcontext context, CUdevice device, std::size_t asked) {
  context = owner_of_memory_in(context);
  if (const auto address = place_small(context, asked)) return address;
  const auto mapped = make_and_map(context, device, kThreshold);
  if (!mapped) return 0;
  const auto unit = mapped->address;
  const auto size = mapped->size;
  // Another thread has made one meanwhile: the driver would have one, too.
  if (const auto address = place_small(context, asked)) {
    driver().cuMemUnmap(unit, size);
    driver().cuMemRelease(mapped->real);
    driver().cuMemAddressFree(unit, size);
    return address;
  }
  // With its first piece, so that it goes with its last.
  enter_served(*mapped, [&](Physical*) {
    const auto life = life_of(context);
    tables().small.units.insert_or_assign(unit, SmallUnit{size, context, life});
    tables().small.memory[{context, life}].add(unit, size, asked);
    enter_small(unit, unit, context, asked);
  });
  anchor(context);
  return unit;
}

// The driver's block goes with the last unit, as its last small block would without the agent.
void drop_anchor_of_none(CUcontext context) {
  {
    const TablesLock lock;
    if (tables().small.memory.contains({context, life_of(context)})) return;
  }
  if (const auto spare = take_spare(context)) (void)driver().cuMemFree_v2(spare);
}

CUdeviceptr allocate(CUcontext context, CUdevice device, std::size_t asked) {
  const auto life = [&] {
    const TablesLock lock;
    return life_of(owner_in(context));
  };
  const auto before = life();
  const auto address = asked < kThreshold ? allocate_small(context, device, asked)
                                          : allocate_large(context, device, asked);
  if (!address || life() == before) return address;
  // Another thread has ended the context meanwhile, and nothing would take this along any more.
  if (const auto ended = take_own(address)) let_go(address, *ended);
  return 0;
}

}  // namespace

// Another allocation may get the address at once: no process opens that by the number of this one,
// and what is known of managed memory is not of this one.
CUresult free_of_driver(CUdeviceptr pointer, const std::function<CUresult()>& free) {
  std::uint64_t number = 0;
  std::map<CUdeviceptr, Managed>::node_type managed;
  std::set<CUdeviceptr>::node_type imported;
  std::set<CUdeviceptr>::node_type outside;
  {
    const TablesLock lock;
    managed = tables().managed.extract(pointer);
    imported = tables().beyond.imported_pointers.extract(pointer);
    outside = tables().beyond.outside_of_driver.extract(pointer);
    for (auto& [known, share] : tables().driver_shares) {
      if (share.address != pointer || share.being_freed) continue;
      share.being_freed = true;
      number = known;
    }
  }
  const auto result = free();
  if (result != CUDA_SUCCESS && (imported || outside)) {
    const TablesLock lock;
    tables().beyond.imported_pointers.insert(std::move(imported));
    tables().beyond.outside_of_driver.insert(std::move(outside));
  }
  if (managed) {
    if (result != CUDA_SUCCESS) {
      const TablesLock lock;
      tables().managed.insert(std::move(managed));
    }
    Agent::note_managed();
  }
  if (number == 0) return result;
  const TablesLock lock;
  const auto at = tables().driver_shares.find(number);
  if (at == tables().driver_shares.end()) return result;
  if (result == CUDA_SUCCESS)
    tables().driver_shares.erase(at);
  else
    at->second.being_freed = false;
  return result;
}

void give_back_deferred() {
  std::vector<std::pair<CUdeviceptr, Allocation>> due;
  {
    const TablesLock lock;
    if (tables().captures.load() == 0) due.swap(tables().to_free);
  }
  for (const auto& [address, allocation] : due)
    give_back(address, allocation);
}

CUresult give_back(CUdeviceptr address, const Allocation& allocation) {
  const auto result = wait_for_work(allocation.context);
  let_go(address, allocation);
  // Memory whose context was destroyed meanwhile has nothing left to wait for.
  return result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED
             ? CUDA_SUCCESS
             : result;
}

namespace hooks {

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t bytes) {
  const Gate::Pass pass;
  CUcontext context = nullptr;
  CUdevice device = 0;
  const auto ask_driver = [&] { return driver().cuMemAlloc_v2(pointer, bytes); };
  if (!pointer || is_inactive() || driver().cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context ||
      driver().cuCtxGetDevice(&device) != CUDA_SUCCESS)
    return ask_driver();
  if (bytes == 0) return ask_driver();
  if (const auto result = ask_driver_about_capture(context); result != CUDA_SUCCESS) return result;
  give_back_deferred();
  auto address = allocate(context, device, bytes);
  // As the driver does, which takes what its pools only keep.
  if (!address && give_back_idle(device)) address = allocate(context, device, bytes);
  if (address) {
    *pointer = address;
    Agent::start();
    return CUDA_SUCCESS;
  }
  // Whatever the reason, the program gets the driver's own answer.
  return ask_driver();
}

namespace {

// Of a row, which the driver has to be asked for; 0: it does not say. It does not depend on the
// height, and is the width up to a multiple of a power of two, 512 (580.159.04): asked for one
// byte, which stays, as to free it would wait for work in flight.
std::size_t pitch_of(std::size_t width, unsigned element) {
  CUcontext context = nullptr;
  CUdevice device = 0;
  if (width == 0 || driver().cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context ||
      driver().cuCtxGetDevice(&device) != CUDA_SUCCESS)
    return 0;
  const auto of_width = [&](std::size_t multiple) {
    return width > SIZE_MAX - multiple ? 0 : (width + multiple - 1) / multiple * multiple;
  };
  const std::pair key(device, element);
  {
    const TablesLock lock;
    const auto at = tables().pitches.find(key);
    if (at != tables().pitches.end()) return of_width(at->second);
  }
  CUdeviceptr row = 0;
  std::size_t multiple = 0;
  if (driver().cuMemAllocPitch_v2(&row, &multiple, 1, 1, element) != CUDA_SUCCESS) return 0;
  keep_spare(context, row);
  const TablesLock lock;
  tables().pitches.emplace(key, multiple);
  return of_width(multiple);
}

}  // namespace

CUresult cuMemAllocPitch_v2(CUdeviceptr* pointer, std::size_t* pitch, std::size_t width,
                            std::size_t height, unsigned element) {
  const Gate::Pass pass;
  const auto ask_driver = [&] {
    CUdevice device = 0;
    driver().cuCtxGetDevice(&device);
    return unless_pools_keep_it(device, [&] {
      return driver().cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    });
  };
  if (height == 0 || !pointer || !pitch || is_inactive()) return ask_driver();
  const auto of_row = pitch_of(width, element);
  if (of_row == 0 || height > SIZE_MAX / of_row ||
      hooks::cuMemAlloc_v2(pointer, of_row * height) != CUDA_SUCCESS)
    return ask_driver();
  *pitch = of_row;
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  const Gate::Pass pass;
  if (in_pool(pointer)) return free_pooled(pointer);
  const auto found = find_allocation(pointer);
  if (!found) return free_of_driver(pointer, [&] { return driver().cuMemFree_v2(pointer); });
  // Another process's, which cuIpcCloseMemHandle gives up.
  if (found->opening()) return CUDA_ERROR_INVALID_VALUE;
  if (const auto result = wait_for_work(found->context); result != CUDA_SUCCESS) return result;
  const auto freed = take_own(pointer);
  // Another thread has freed it meanwhile: the program's mistake.
  if (!freed) return CUDA_ERROR_INVALID_VALUE;
  give_back_deferred();
  let_go(pointer, *freed);
  if (freed->in_unit()) drop_anchor_of_none(freed->context);
  return CUDA_SUCCESS;
}

}  // namespace hooks
}  // namespace stasis::preload
