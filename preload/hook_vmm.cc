// Virtual memory management by the program itself: its handles are the agent's.
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>

#include "abi/agent_thread.h"
#include "activation.h"
#include "agent.h"
#include "eviction_internal.h"
#include "gate.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "precopy.h"
#include "sharing.h"

namespace stasis::preload::hooks {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// What the program has, if it is the agent's and has not been released.
Physical* held(CUmemGenericAllocationHandle handle) {
  auto* physical = physical_of(handle);
  return physical && physical->handles > 0 ? physical : nullptr;
}

// Whether the program has released all handles of what is still mapped: to the driver the number
// says nothing, or something else.
bool is_released(CUmemGenericAllocationHandle handle) {
  const TablesLock lock;
  const auto* physical = physical_of(handle);
  return physical && physical->handles == 0;
}

// The driver's handle of one that the program has.
CUmemGenericAllocationHandle real_of(CUmemGenericAllocationHandle handle) {
  const TablesLock lock;
  const auto* physical = held(handle);
  return physical ? physical->real : handle;
}

// The program has given up a handle of a multicast object, or what was mapped in the range.
void forget_multicasts(CUmulticastHandle released, CUdeviceptr address, std::size_t size) {
  const TablesLock lock;
  auto& all = tables().multicasts;
  for (auto& [handle, multicast] : all) {
    if (handle == released && multicast.handles > 0) --multicast.handles;
    auto& mapped = multicast.mapped;
    mapped.erase(mapped.lower_bound(address), mapped.lower_bound(address + size));
  }
  std::erase_if(
      all, [](const auto& one) { return one.second.handles == 0 && one.second.mapped.empty(); });
}

constexpr auto kDescriptor = static_cast<unsigned>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

bool is_ours_to_make(const CUmemAllocationProp& prop) {
  const auto asked = static_cast<unsigned>(prop.requestedHandleTypes);
  return prop.type == CU_MEM_ALLOCATION_TYPE_PINNED && !(asked & ~kDescriptor);
}

// What `make` gets from the driver for the program, under a number by which that knows nothing
// else: what was there before the agent keeps the number that the driver had given it.
template <class Make>
CUresult under_new_number(CUmemGenericAllocationHandle* handle, Make make) {
  Unneeded taken;
  for (;;) {
    const auto result = make();
    {
      const TablesLock lock;
      if (result == CUDA_SUCCESS && handle && physical_of(*handle)) {
        taken.push_back(*handle);
        continue;
      }
    }
    release(taken);
    return result;
  }
}

}  // namespace

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size,
                     const CUmemAllocationProp* prop, unsigned long long flags) {
  const Gate::Pass pass;
  const unsigned asked = prop ? static_cast<unsigned>(prop->requestedHandleTypes) : 0U;
  const auto by_driver = [&] {
    return under_new_number(handle,
                            [&] { return driver().cuMemCreate(handle, size, prop, flags); });
  };
  if (!handle || !prop || flags || is_inactive() || !is_ours_to_make(*prop)) return by_driver();
  auto exportable = *prop;
  const bool on_device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  // Memory of the host's is not copied by a mover.
  if (on_device) exportable.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  std::optional<SharingCall> sharing;
  if (!on_device) sharing.emplace();
  CUmemGenericAllocationHandle real = 0;
  const auto result = unless_pools_keep_it(
      prop->location.id, [&] { return driver().cuMemCreate(&real, size, &exportable, 0); });
  if (result != CUDA_SUCCESS) return by_driver();
  CUcontext context = nullptr;
  CUdevice device = 0;
  const bool in_context = driver().cuCtxGetCurrent(&context) == CUDA_SUCCESS && context &&
                          driver().cuCtxGetDevice(&device) == CUDA_SUCCESS;
  {
    const TablesLock lock;
    auto* physical = enter_physical(on_device ? MemoryOrigin::kProgram : MemoryOrigin::kHost, real,
                                    size, exportable, asked);
    physical->handles = 1;
    *handle = physical->handle;
    if (in_context) tables().contexts.devices.emplace(owner_in(context), device);
  }
  Agent::start();
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Gate::Pass pass;
  if (is_released(handle)) return CUDA_ERROR_INVALID_VALUE;
  Unneeded unneeded;
  {
    const TablesLock lock;
    auto* physical = held(handle);
    if (physical) {
      --physical->handles;
      forget_if_unused(physical, unneeded);
    } else {
      unneeded.push_back(handle);
    }
    if (physical && unneeded.empty()) return CUDA_SUCCESS;
  }
  wait_for_precopy();
  const auto result = driver().cuMemRelease(unneeded.front());
  if (result == CUDA_SUCCESS) forget_multicasts(handle, 0, 0);
  return result;
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  const Gate::Pass pass;
  if (is_released(handle)) return CUDA_ERROR_INVALID_VALUE;
  Physical* physical = nullptr;
  auto real = handle;
  {
    const TablesLock lock;
    physical = held(handle);
    if (physical) {
      real = physical->real;
      // At once, so that it outlasts a release by another thread.
      ++physical->mappings;
      // The driver does not say how large what was imported is.
      if (physical->is_imported()) physical->size = std::max(physical->size, offset + size);
    }
  }
  const auto result = driver().cuMemMap(address, size, offset, real, flags);
  if (!physical) {
    const TablesLock lock;
    const auto at = tables().multicasts.find(handle);
    if (result == CUDA_SUCCESS && at != tables().multicasts.end() && at->second.handles > 0)
      at->second.mapped[address] = size;
    return result;
  }
  Unneeded unneeded;
  {
    const TablesLock lock;
    if (result == CUDA_SUCCESS) {
      tables().mappings.insert_or_assign(address, Mapping{address, size, offset, physical, {}});
    } else {
      --physical->mappings;
      forget_if_unused(physical, unneeded);
    }
  }
  release(unneeded);
  return result;
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  const Gate::Pass pass;
  {
    const TablesLock lock;
    if (is_allocated(address, size)) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto result = driver().cuMemUnmap(address, size);
  if (result != CUDA_SUCCESS) return result;
  drop_and_release(address, size);
  forget_multicasts(0, address, size);
  return result;
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* rights,
                        std::size_t count) {
  const Gate::Pass pass;
  {
    const TablesLock lock;
    if (is_allocated(address, size)) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto result = driver().cuMemSetAccess(address, size, rights, count);
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  for (std::size_t i = 0; i < count; ++i)
    enter_access(address, size, rights[i]);
  return result;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const Gate::Pass pass;
  const auto pointer = reinterpret_cast<CUdeviceptr>(address);
  {
    const TablesLock lock;
    if (const auto* mapping = mapping_at(pointer)) {
      // The driver has no handle of what cuMemAlloc gave.
      if (!handle || is_allocated(mapping->address, mapping->size)) return CUDA_ERROR_INVALID_VALUE;
      ++mapping->physical->handles;
      *handle = mapping->physical->handle;
      return CUDA_SUCCESS;
    }
  }
  const auto result = driver().cuMemRetainAllocationHandle(handle, address);
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  for (const auto& [known, multicast] : tables().multicasts) {
    const auto after = multicast.mapped.upper_bound(pointer);
    if (after == multicast.mapped.begin()) continue;
    const auto& [start, size] = *std::prev(after);
    if (pointer - start >= size) continue;
    ++tables().multicasts[*handle].handles;
    break;
  }
  return result;
}

// The program gets a descriptor of the agent's, which other agents know the piece by: the driver's
// own says nothing of what it is, and cannot be open while the driver checkpoints the process.
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  const Gate::Pass pass;
  if (is_released(handle)) return CUDA_ERROR_INVALID_VALUE;
  CUmemGenericAllocationHandle real = handle;
  {
    const TablesLock lock;
    if (auto* physical = held(handle)) {
      if (!(physical->asked_handle_types & type)) return CUDA_ERROR_INVALID_VALUE;
      real = physical->real;
      // Processes that a program starts later have no agent if it was given its own while it ran.
      if (shareable && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0 &&
          !is_attached()) {
        const int fd = descriptor_of_share(*physical);
        if (fd >= 0) {
          std::memcpy(shareable, &fd, sizeof fd);
          return CUDA_SUCCESS;
        }
      }
      // Even if it fails: the agent does not know what has left by then.
      physical->reach.stay();
    }
  }
  const auto result = driver().cuMemExportToShareableHandle(shareable, real, type, flags);
  if (result != CUDA_SUCCESS || type != CU_MEM_HANDLE_TYPE_FABRIC) return result;
  const SharingCall sharing;
  const TablesLock lock;
  ++tables().beyond.fabric_exports;
  return result;
}

namespace {

// What the program will hold as `handle`. `connection`: to its owner, if that has an agent.
void enter_imported(CUmemGenericAllocationHandle* handle, CUmemGenericAllocationHandle real,
                    std::size_t size, const ShareKey& key, int connection) {
  CUmemAllocationProp prop{};
  (void)driver().cuMemGetAllocationPropertiesFromHandle(&prop, real);
  const TablesLock lock;
  auto* physical = enter_physical(MemoryOrigin::kImported, real, size, prop,
                                  static_cast<unsigned>(prop.requestedHandleTypes));
  physical->handles = 1;
  physical->reach.enter_key(key);
  if (key != ShareKey{}) hold_owner(connection, key);
  *handle = physical->handle;
}

// Of this process's own.
bool import_own(CUmemGenericAllocationHandle* handle, const ShareKey& key) {
  const TablesLock lock;
  const auto at = tables().shares.find(key.share);
  if (!is_own_locked(key) || at == tables().shares.end()) return false;
  ++at->second->handles;
  *handle = at->second->handle;
  return true;
}

}  // namespace

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
  const auto key =
      type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && handle && !is_inactive()
          ? key_of_descriptor(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)))
          : std::nullopt;
  if (!key) {
    const Gate::Pass pass;
    CUmemGenericAllocationHandle real = 0;
    if (!handle || is_inactive())
      return driver().cuMemImportFromShareableHandle(handle, shareable, type);
    const SharingCall sharing;
    const auto result = driver().cuMemImportFromShareableHandle(&real, shareable, type);
    if (result != CUDA_SUCCESS) return result;
    enter_imported(handle, real, 0, {}, -1);
    return result;
  }
  if (import_own(handle, *key)) return CUDA_SUCCESS;
  // Not within the gate: the owner may be suspended, and this process is to be suspended meanwhile.
  const SharingCall sharing;
  for (;;) {
    const auto changes = Gate::changes();
    const auto fetched = fetch(*key);
    if (fetched.result != CUDA_SUCCESS) return fetched.result;
    const Gate::TryPass pass;
    if (!is_of_use(fetched, *key, changes, pass)) continue;
    CUmemGenericAllocationHandle real = 0;
    const auto result = driver().cuMemImportFromShareableHandle(
        &real, reinterpret_cast<void*>(static_cast<std::intptr_t>(fetched.memory)), type);
    ::close(fetched.memory);
    if (result != CUDA_SUCCESS) {
      end_connection(fetched.connection, *key);
      return result;
    }
    enter_imported(handle, real, fetched.reserved, *key, fetched.connection);
    return result;
  }
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                CUmemGenericAllocationHandle handle) {
  const Gate::Pass pass;
  if (is_released(handle)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = driver().cuMemGetAllocationPropertiesFromHandle(prop, real_of(handle));
  if (result != CUDA_SUCCESS) return result;
  const TablesLock lock;
  if (const auto* physical = held(handle))
    prop->requestedHandleTypes =
        static_cast<CUmemAllocationHandleType>(physical->asked_handle_types);
  return result;
}

// A descriptor of the memory for other devices: dma-buf.
namespace {

// Which closes what it gets at once (attach/gpu_survey.h).
bool is_a_tools_thread() {
  std::array<char, 16> name{};
  return ::prctl(PR_GET_NAME, name.data()) == 0 && std::strcmp(name.data(), kInsideThread) == 0;
}

}  // namespace

CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, std::size_t size,
                                       unsigned type, unsigned long long flags) {
  const Gate::Pass pass;
  const SharingCall sharing;
  const auto result = driver().cuMemGetHandleForAddressRange(handle, address, size, type, flags);
  if (result != CUDA_SUCCESS || is_a_tools_thread()) return result;
  CUdeviceptr base = address;
  std::size_t whole = 0;
  driver().cuMemGetAddressRange_v2(&base, &whole, address);
  // The gate closes only when this call has ended.
  const TablesLock lock;
  if (!mark_outside(address, size)) tables().beyond.outside_of_driver.insert(base);
  return result;
}

namespace {

// The driver's handle of a multicast object. What another process has made was taken for memory
// when it was imported: the driver does not say what it is, and these calls do.
CUmulticastHandle multicast_of(CUmulticastHandle handle) {
  const TablesLock lock;
  auto* physical = held(handle);
  if (!physical) return handle;
  if (physical->is_imported()) physical->origin = MemoryOrigin::kMulticast;
  return physical->real;
}

// The driver's handle of what is bound. Hardware has it from now on.
CUmemGenericAllocationHandle bound(CUmemGenericAllocationHandle handle) {
  const TablesLock lock;
  auto* physical = physical_of(handle);
  if (!physical) return handle;
  physical->reach.stay();
  return physical->real;
}

void bound(CUdeviceptr address, std::size_t size) {
  const TablesLock lock;
  mark_staying(address, size);
}

}  // namespace

CUresult cuMulticastCreate(CUmemGenericAllocationHandle* multicast,
                           const CUmulticastObjectProp* prop) {
  const Gate::Pass pass;
  const SharingCall sharing;
  const auto result =
      under_new_number(multicast, [&] { return driver().cuMulticastCreate(multicast, prop); });
  if (result != CUDA_SUCCESS || !multicast) return result;
  const TablesLock lock;
  ++tables().multicasts[*multicast].handles;
  return result;
}

CUresult cuMulticastAddDevice(CUmulticastHandle multicast, CUdevice device) {
  const Gate::Pass pass;
  return driver().cuMulticastAddDevice(multicast_of(multicast), device);
}

CUresult cuMulticastUnbind(CUmulticastHandle multicast, CUdevice device,
                           std::size_t multicast_offset, std::size_t size) {
  const Gate::Pass pass;
  return driver().cuMulticastUnbind(multicast_of(multicast), device, multicast_offset, size);
}

CUresult cuMulticastBindMem(CUmulticastHandle multicast, std::size_t multicast_offset,
                            CUmemGenericAllocationHandle handle, std::size_t offset,
                            std::size_t size, unsigned long long flags) {
  const Gate::Pass pass;
  return driver().cuMulticastBindMem(multicast_of(multicast), multicast_offset, bound(handle),
                                     offset, size, flags);
}

CUresult cuMulticastBindMem_v2(CUmulticastHandle multicast, CUdevice device,
                               std::size_t multicast_offset, CUmemGenericAllocationHandle handle,
                               std::size_t offset, std::size_t size, unsigned long long flags) {
  const Gate::Pass pass;
  return driver().cuMulticastBindMem_v2(multicast_of(multicast), device, multicast_offset,
                                        bound(handle), offset, size, flags);
}

CUresult cuMulticastBindAddr(CUmulticastHandle multicast, std::size_t multicast_offset,
                             CUdeviceptr address, std::size_t size, unsigned long long flags) {
  const Gate::Pass pass;
  bound(address, size);
  return driver().cuMulticastBindAddr(multicast_of(multicast), multicast_offset, address, size,
                                      flags);
}

CUresult cuMulticastBindAddr_v2(CUmulticastHandle multicast, CUdevice device,
                                std::size_t multicast_offset, CUdeviceptr address, std::size_t size,
                                unsigned long long flags) {
  const Gate::Pass pass;
  bound(address, size);
  return driver().cuMulticastBindAddr_v2(multicast_of(multicast), device, multicast_offset, address,
                                         size, flags);
}

namespace {

// Sparse arrays: the handles are within the list. They stay.
CUresult map_arrays(fn::cuMemMapArrayAsync* call, void* list, unsigned count, CUstream stream) {
  // CUarrayMapInfo of CUDA 11.1 and newer: 96 bytes, the handle at 64.
  constexpr std::size_t kInfo = 96;
  constexpr std::size_t kHandle = 64;
  if (!list) return call(list, count, stream);
  std::vector<char> copy(static_cast<char*>(list), static_cast<char*>(list) + count * kInfo);
  {
    const TablesLock lock;
    for (unsigned i = 0; i < count; ++i) {
      CUmemGenericAllocationHandle handle = 0;
      std::memcpy(&handle, copy.data() + i * kInfo + kHandle, sizeof handle);
      if (auto* physical = physical_of(handle)) {
        physical->reach.stay();
        std::memcpy(copy.data() + i * kInfo + kHandle, &physical->real, sizeof handle);
      }
    }
  }
  return call(copy.data(), count, stream);
}

}  // namespace

CUresult cuMemMapArrayAsync(void* list, unsigned count, CUstream stream) {
  const Gate::Pass pass;
  return map_arrays(driver().cuMemMapArrayAsync, list, count, stream);
}

CUresult cuMemMapArrayAsync_ptsz(void* list, unsigned count, CUstream stream) {
  const Gate::Pass pass;
  return map_arrays(driver().cuMemMapArrayAsync_ptsz, list, count, stream);
}

}  // namespace stasis::preload::hooks
