// Virtual memory management.
#include "sim/api.h"
#include "sim/driver.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

CUresult check_prop(Driver& driver, const CUmemAllocationProp* prop) {
  if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  switch (prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      if (!driver.valid_device(prop->location.id)) return CUDA_ERROR_INVALID_DEVICE;
      break;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      if (prop->location.id != 0) return CUDA_ERROR_INVALID_VALUE;  // one node is enough
      break;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  const unsigned known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (prop->requestedHandleTypes & ~known) return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

Object* object_of(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Object*>(handle); }
CUmemGenericAllocationHandle handle_of(Object* object) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(object);
}

bool is_multicast(Driver& driver, CUmemGenericAllocationHandle handle) {
  const auto* object = object_of(handle);
  return driver.memory.is_handle(object) && object->kind.multicast;
}

bool has_range(Driver& driver, CUmemGenericAllocationHandle multicast, std::size_t offset,
               std::size_t size) {
  if (!is_multicast(driver, multicast)) return false;
  const auto whole = object_of(multicast)->size;
  return offset <= whole && size <= whole - offset;
}

// The ordinal of a slot; what is imported may lie on a GPU that this process does not see (measured
// on an H200).
int ordinal_of(Driver& driver, int slot) {
  constexpr int kInvalidDevice = -2;
  for (std::size_t i = 0; i < driver.devices.size(); ++i) {
    if (driver.devices[i].slot == slot) return static_cast<int>(i);
  }
  return kInvalidDevice;
}

}  // namespace

CUresult cuMemAddressReserve(CUdeviceptr* pointer, std::size_t size, std::size_t alignment,
                             CUdeviceptr hint, unsigned long long flags) {
  return passing([&](Driver& driver) -> CUresult {
    if (!pointer || flags) return CUDA_ERROR_INVALID_VALUE;
    if (auto rc = suffer(driver.next_plan(FaultAction::kReserve)); rc != CUDA_SUCCESS) return rc;
    return driver.memory.reserve(size, alignment, hint, *pointer);
  });
}

CUresult cuMemAddressFree(CUdeviceptr pointer, std::size_t size) {
  return passing([&](Driver& driver) { return driver.memory.unreserve(pointer, size); });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size,
                     const CUmemAllocationProp* prop, unsigned long long flags) {
  return gated([&](Driver& driver) -> CUresult {
    if (!handle || flags) return CUDA_ERROR_INVALID_VALUE;
    if (auto rc = check_prop(driver, prop); rc != CUDA_SUCCESS) return rc;
    // Memory of the host's takes room on the first GPU here, which the real one does not.
    const bool host = prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
    const int slot = driver.devices[host ? 0 : Driver::ordinal_index(prop->location.id)].slot;
    Object* object = nullptr;
    auto rc = driver.memory.create(
        slot, size, {prop->requestedHandleTypes, prop->allocFlags.usage, host, false}, object);
    if (rc == CUDA_SUCCESS) *handle = handle_of(object);
    return rc;
  });
}

// Memory on the first GPU. What is added and bound to it is looked at, and otherwise forgotten.
CUresult cuMulticastCreate(CUmemGenericAllocationHandle* multicast,
                           const CUmulticastObjectProp* prop) {
  return gated([&](Driver& driver) -> CUresult {
    if (!multicast || !prop || prop->numDevices == 0) return CUDA_ERROR_INVALID_VALUE;
    Object* object = nullptr;
    const auto types = static_cast<std::uint32_t>(prop->handleTypes);
    const auto rc =
        driver.memory.create(driver.devices[0].slot, prop->size, {types, 0, false, true}, object);
    if (rc == CUDA_SUCCESS) *multicast = handle_of(object);
    return rc;
  });
}

CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle multicast, CUdevice device) {
  return gated([&](Driver& driver) -> CUresult {
    if (!is_multicast(driver, multicast)) return CUDA_ERROR_INVALID_VALUE;
    return driver.valid_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  });
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle multicast, std::size_t multicast_offset,
                            CUmemGenericAllocationHandle memory, std::size_t offset,
                            std::size_t size, unsigned long long flags) {
  return gated([&](Driver& driver) -> CUresult {
    const auto* object = object_of(memory);
    if (flags || !driver.memory.is_handle(object) || offset > object->size ||
        size > object->size - offset)
      return CUDA_ERROR_INVALID_VALUE;
    return has_range(driver, multicast, multicast_offset, size) ? CUDA_SUCCESS
                                                                : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle multicast, std::size_t multicast_offset,
                             CUdeviceptr pointer, std::size_t size, unsigned long long flags) {
  return gated([&](Driver& driver) -> CUresult {
    if (flags || !driver.memory.accessible(pointer, size)) return CUDA_ERROR_INVALID_VALUE;
    return has_range(driver, multicast, multicast_offset, size) ? CUDA_SUCCESS
                                                                : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle multicast, CUdevice device,
                           std::size_t multicast_offset, std::size_t size) {
  return gated([&](Driver& driver) -> CUresult {
    if (!driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return has_range(driver, multicast, multicast_offset, size) ? CUDA_SUCCESS
                                                                : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return gated([&](Driver& driver) { return driver.memory.release(object_of(handle)); });
}

CUresult cuMemMap(CUdeviceptr pointer, std::size_t size, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return gated([&](Driver& driver) -> CUresult {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    auto* object = object_of(handle);
    if (!driver.memory.is_handle(object)) return CUDA_ERROR_INVALID_VALUE;
    return driver.memory.map(pointer, size, offset, object, ordinal_of(driver, object->gpu));
  });
}

CUresult cuMemUnmap(CUdeviceptr pointer, std::size_t size) {
  return gated([&](Driver& driver) -> CUresult {
    // Unlike freeing it waits for nothing (580.159.04).
    return driver.memory.unmap(pointer, size);
  });
}

CUresult cuMemSetAccess(CUdeviceptr pointer, std::size_t size, const CUmemAccessDesc* desc,
                        std::size_t count) {
  return gated([&](Driver& driver) -> CUresult {
    if (!desc || count == 0) return CUDA_ERROR_INVALID_VALUE;
    Memory::Rights rights;
    for (std::size_t i = 0; i < count; ++i) {
      const bool host = desc[i].location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
      if (!host && desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
      if (!host && !driver.valid_device(desc[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
      const auto user = std::uint64_t{1} << (host ? Memory::kHost : desc[i].location.id);
      switch (desc[i].flags) {
        case CU_MEM_ACCESS_FLAGS_PROT_NONE:
          rights.others |= user;
          break;
        case CU_MEM_ACCESS_FLAGS_PROT_READ:
          rights.readers |= user;
          break;
        case CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
          rights.writers |= user;
          break;
        default:
          return CUDA_ERROR_INVALID_VALUE;
      }
    }
    return driver.memory.protect(pointer, size, rights);
  });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr pointer) {
  return gated([&](Driver& driver) -> CUresult {
    if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!driver.valid_device(location->id)) return CUDA_ERROR_INVALID_DEVICE;
    int prot = PROT_NONE;
    if (auto rc = driver.memory.protection(pointer, location->id, prot); rc != CUDA_SUCCESS)
      return rc;
    *flags = prot & PROT_WRITE  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
             : prot & PROT_READ ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
  return gated([&](Driver& driver) -> CUresult {
    if (!granularity || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (auto rc = check_prop(driver, prop); rc != CUDA_SUCCESS) return rc;
    *granularity = kGranule;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  return gated([&](Driver& driver) -> CUresult {
    if (!shareable || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    int fd = -1;
    auto rc = driver.memory.export_fd(object_of(handle), fd);
    if (rc == CUDA_SUCCESS) *static_cast<int*>(shareable) = fd;
    return rc;
  });
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle,
                                        CUmemAllocationHandleType type) {
  return gated([&](Driver& driver) -> CUresult {
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (auto rc = suffer(driver.next_plan(FaultAction::kImport)); rc != CUDA_SUCCESS) return rc;
    Object* object = nullptr;
    const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
    auto rc = driver.memory.import_fd(fd, object);
    if (rc == CUDA_SUCCESS) *handle = handle_of(object);
    return rc;
  });
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  return gated([&](Driver& driver) -> CUresult {
    if (!handle || !address) return CUDA_ERROR_INVALID_VALUE;
    Object* object = nullptr;
    auto rc = driver.memory.retain(reinterpret_cast<Address>(address), object);
    if (rc == CUDA_SUCCESS) *handle = handle_of(object);
    return rc;
  });
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                CUmemGenericAllocationHandle handle) {
  return gated([&](Driver& driver) -> CUresult {
    auto* object = object_of(handle);
    if (!prop || !driver.memory.is_handle(object)) return CUDA_ERROR_INVALID_VALUE;
    *prop = CUmemAllocationProp{};
    prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(object->kind.handle_types);
    prop->allocFlags.usage = static_cast<unsigned short>(object->kind.usage);
    prop->location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal_of(driver, object->gpu)};
    if (object->kind.host) prop->location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    return CUDA_SUCCESS;
  });
}
