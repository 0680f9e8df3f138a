// Device, host and pooled memory, legacy IPC, and questions about pointers.
// Long because the driver's calls for memory are many, each short.
#include <sys/mman.h>

#include <cstring>

#include "sim/api.h"
#include "sim/driver.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

int slot_of(Driver& driver, const Context& context) {
  return driver.devices[Driver::ordinal_index(context.device)].slot;
}

Address address(const void* pointer) { return reinterpret_cast<Address>(pointer); }

CUresult allocate(CUdeviceptr* out, std::size_t bytes) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (auto rc = suffer(driver.next_plan(FaultAction::kAllocate)); rc != CUDA_SUCCESS) return rc;
    return driver.memory.allocate(slot_of(driver, context), context.device, bytes, &context, *out);
  });
}

CUresult allocate_pooled(Driver& driver, CUdeviceptr* out, std::size_t bytes, Pool& pool,
                         const Stream& stream) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = 0;
  if (bytes == 0) return CUDA_SUCCESS;
  const int slot = driver.devices[Driver::ordinal_index(pool.device)].slot;
  return driver.memory.allocate_pooled(slot, pool.device, bytes, &pool, pool.max_size, stream.id,
                                       *out);
}

CUresult allocate_host(void** out, std::size_t bytes, unsigned flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!out || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    *out = nullptr;
    if (bytes == 0) return CUDA_SUCCESS;
    Address base = 0;
    const auto rc = driver.memory.allocate_host(Kind::kPinned, context.device, bytes, &context,
                                                flags | kMemHostAllocDeviceMap, base);
    if (rc == CUDA_SUCCESS) *out = reinterpret_cast<void*>(base);
    return rc;
  });
}

bool is_host(Kind kind) { return kind == Kind::kPinned || kind == Kind::kRegistered; }

Pool* find_pool(Driver& driver, CUmemoryPool handle) {
  auto* pool = reinterpret_cast<Pool*>(handle);
  std::lock_guard lock(driver.mutex);
  return driver.pools.contains(pool) ? pool : nullptr;
}

CUmemoryPool handle_of(Pool* pool) { return reinterpret_cast<CUmemoryPool>(pool); }

template <class T>
CUresult answer(void* data, T value) {
  // NOLINTNEXTLINE(bugprone-sizeof-expression): a handle is the answer, not what it points to
  std::memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

// As on a Hopper with 580: of what cuMemAlloc gives, and of what cuMemCreate was asked for.
bool can_decompress_into(const Allocation& a) {
  if (a.kind == Kind::kDevice) return !a.pool;
  return a.object && (a.object->kind.usage & kMemCreateUsageHwDecompress);
}

CUresult pointer_attribute(Driver& driver, void* data, CUpointer_attribute attribute,
                           CUdeviceptr pointer) {
  Allocation a;
  if (!driver.memory.find(pointer, 1, a)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return answer(data, a.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return answer(data, is_host(a.kind) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return answer(data, pointer);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (!is_host(a.kind) && a.kind != Kind::kManaged) return CUDA_ERROR_INVALID_VALUE;
      return answer(data, pointer);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      if (a.kind == Kind::kMapped) return CUDA_ERROR_NOT_SUPPORTED;
      return answer(data, unsigned{a.sync_memops});
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return answer(data, a.id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return answer(data, int{a.kind == Kind::kManaged});
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return answer(data, a.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return answer(data, a.kind == Kind::kDevice && !a.pool);
    // Of virtual memory the range is what is reserved, not the mapping in it (580.159.04).
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return answer(data, driver.memory.range_of(a).first);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return answer(data, std::size_t{driver.memory.range_of(a).second});
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return answer(data, true);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return answer(data, std::uint64_t{a.object ? a.object->kind.handle_types : 0});
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return answer(data, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return answer(data, a.pool);
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      return answer(data, can_decompress_into(a));
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      break;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// What an unknown pointer answers to cuPointerGetAttributes, which does not fail for it.
void default_attribute(void* data, CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      answer(data, -2);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      answer(data, 0);
      break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      answer(data, false);
      break;
    default:
      answer(data, std::uint64_t{0});
      break;
  }
}

}  // namespace

CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return in_context_passing([&](Driver& driver, Context& context) -> CUresult {
    const int slot = slot_of(driver, context);
    if (free) *free = driver.memory.free_bytes(slot);
    if (total) *total = driver.memory.gpu(slot).capacity;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t bytes) { return allocate(pointer, bytes); }

CUresult cuMemAllocPitch_v2(CUdeviceptr* pointer, std::size_t* pitch, std::size_t width,
                            std::size_t height, unsigned int element_size) {
  const bool legal_element = element_size == 4 || element_size == 8 || element_size == 16;
  if (!pitch || !legal_element || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto padded = (width + 511) / 512 * 512;
  const auto rc = allocate(pointer, padded * height);
  if (rc == CUDA_SUCCESS) *pitch = padded;
  return rc;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  // From a thread without a context too (580.159.04).
  Allocation a;
  const auto freed = gated([&](Driver& driver) -> CUresult {
    if (!pointer) return CUDA_SUCCESS;
    if (!driver.memory.find(pointer, 1, a) || a.base != pointer) return CUDA_ERROR_INVALID_VALUE;
    // Freeing waits for the device, so that nothing in flight loses its memory.
    if (a.context && !a.context->destroyed) a.context->synchronize();
    return driver.memory.free(pointer);
  });
  // Of a pool: the program says that it is done with it, and nothing was waited for.
  if (freed == CUDA_SUCCESS && a.pool) trim_pools(*live_driver());
  return freed;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* size, CUdeviceptr pointer) {
  return in_context_passing([&](Driver& driver, Context&) -> CUresult {
    Allocation a;
    const bool found = driver.memory.find(pointer, 1, a) && !is_host(a.kind);
    // Nothing there: 0 (seen on an H200, 580).
    if (base) *base = found ? a.base : 0;
    if (size) *size = found ? a.size : 0;
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
  });
}

CUresult cuMemAllocHost_v2(void** pointer, std::size_t bytes) {
  return allocate_host(pointer, bytes, 0);
}

CUresult cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned int flags) {
  return allocate_host(pointer, bytes, flags);
}

CUresult cuMemFreeHost(void* pointer) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!pointer) return CUDA_SUCCESS;
    context.synchronize();
    return driver.memory.free_host(address(pointer));
  });
}

CUresult cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned int flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (flags > 15) return CUDA_ERROR_INVALID_VALUE;
    return driver.memory.register_host(address(pointer), bytes, context.device, &context, flags);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    context.synchronize();
    return driver.memory.unregister_host(address(pointer));
  });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned int flags) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    Allocation a;
    if (!device || flags) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.memory.find(address(host), 1, a) || !is_host(a.kind)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *device = address(host);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    Allocation a;
    if (!flags || !driver.memory.find(address(pointer), 1, a) || a.kind != Kind::kPinned) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = a.flags;
    return CUDA_SUCCESS;
  });
}

// --- Pools. Memory is taken at the call and given back in the stream's order.

CUresult cuMemAllocAsync(CUdeviceptr* pointer, std::size_t bytes, CUstream handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    const auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    auto& device = driver.devices[Driver::ordinal_index(stream->context->device)];
    return allocate_pooled(driver, pointer, bytes, *device.current_pool, *stream);
  });
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool handle,
                                 CUstream stream_handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    const auto* stream = find_stream(driver, context, stream_handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    return allocate_pooled(driver, pointer, bytes, *pool, *stream);
  });
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* stream = find_stream(driver, context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (pointer == 0) return CUDA_SUCCESS;
    Allocation a;
    if (!driver.memory.find(pointer, 1, a) || a.base != pointer || a.kind != Kind::kDevice) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    // A stream works in its own context, whatever is current.
    if (!a.pool) {
      stream->context->submit(*stream, [&driver, pointer] { driver.memory.free(pointer); });
      return CUDA_SUCCESS;
    }
    std::uint64_t freed = 0;
    const auto rc = driver.memory.free_pooled(pointer, stream->id, freed);
    if (rc != CUDA_SUCCESS) return rc;
    stream->context->submit(*stream, [&driver, freed] { driver.memory.pass_pooled(freed); });
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  return gated([&](Driver& driver) -> CUresult {
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *pool = handle_of(&driver.devices[Driver::ordinal_index(device)].default_pool);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  return gated([&](Driver& driver) -> CUresult {
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard lock(driver.mutex);
    *pool = handle_of(driver.devices[Driver::ordinal_index(device)].current_pool);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!pool || pool->device != device) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    driver.devices[Driver::ordinal_index(device)].current_pool = pool;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* props) {
  return gated([&](Driver& driver) -> CUresult {
    if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        props->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!driver.valid_device(props->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    if (props->handleTypes > CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      return CUDA_ERROR_NOT_SUPPORTED;
    auto* pool = new Pool;
    pool->max_size = props->maxSize;
    pool->device = props->location.id;
    std::lock_guard lock(driver.mutex);
    driver.pools.insert(pool);
    *out = handle_of(pool);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    auto& device = driver.devices[Driver::ordinal_index(pool->device)];
    if (device.current_pool == pool) device.current_pool = &device.default_pool;
    driver.pools.erase(pool);  // kept in memory: allocations may still name it
    driver.memory.destroy_pool(pool);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, std::size_t keep) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    driver.memory.trim_pool(pool, keep, false);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool || !value || attribute < 1 || attribute > CU_MEMPOOL_ATTR_USED_MEM_HIGH ||
        attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ||
        attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    std::uint64_t number = 0;
    const bool is_int = attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    std::memcpy(&number, value, is_int ? sizeof(int) : sizeof number);
    if (attribute > CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
      if (number != 0) return CUDA_ERROR_INVALID_VALUE;
      driver.memory.reset_pool_highs(pool, attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH);
      return CUDA_SUCCESS;
    }
    std::lock_guard lock(driver.mutex);
    pool->attributes[attribute] = number;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
    const auto use = driver.memory.pool_use(pool);
    switch (attribute) {
      case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return answer(value, use.reserved);
      case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return answer(value, use.reserved_high);
      case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return answer(value, use.used);
      case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return answer(value, use.used_high);
      case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: {
        std::lock_guard lock(driver.mutex);
        return answer(value, static_cast<int>(pool->attributes[attribute]));
      }
      case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: {
        std::lock_guard lock(driver.mutex);
        return answer(value, pool->attributes[attribute]);
      }
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}

// Every device reaches all memory; to take a pool's own device its right is an error, and there is
// no right to read alone (580.159.04).
CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* map, std::size_t count) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool || (count && !map)) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    for (std::size_t i = 0; i < count; ++i) {
      const auto device = map[i].location.id;
      if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ) return CUDA_ERROR_NOT_SUPPORTED;
      if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE && device == pool->device)
        return CUDA_ERROR_INVALID_DEVICE;
      if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
        pool->others.erase(device);
      else
        pool->others.insert(device);
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle,
                            CUmemLocation* location) {
  return gated([&](Driver& driver) -> CUresult {
    auto* pool = find_pool(driver, handle);
    if (!pool || !flags || !location) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    *flags = location->id == pool->device || pool->others.contains(location->id)
                 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
  });
}

// Of memory that it has made itself a process gets a descriptor, of imported memory it does not
// (seen of pools: H200, 580). The descriptor stands for nothing here.
CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr start, std::size_t size, int type,
                                       unsigned long long flags) {
  return passing([&](Driver& driver) -> CUresult {
    constexpr int kDmaBuf = 1;
    Allocation a;
    if (!handle || type != kDmaBuf || flags != 0 || size == 0) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.memory.find(start, size, a)) return CUDA_ERROR_INVALID_VALUE;
    const bool is_made_here = (a.kind == Kind::kDevice || a.kind == Kind::kMapped) &&
                              (!a.object || a.object->origin == Object::Origin::kOwn);
    if (!is_made_here) return CUDA_ERROR_NOT_SUPPORTED;
    const int fd = ::memfd_create("stasis-sim-range", MFD_CLOEXEC);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    return answer(handle, fd);
  });
}

// --- Legacy IPC

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    return driver.memory.export_ipc(pointer, *handle);
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned int flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!pointer || flags != kIpcMemLazyEnablePeerAccess) return CUDA_ERROR_INVALID_VALUE;
    return driver.memory.import_ipc(handle, context.device, &context, *pointer);
  });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    context.synchronize();
    return driver.memory.close_ipc(pointer);
  });
}

// --- Questions about pointers

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return passing([&](Driver& driver) -> CUresult {
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    return pointer_attribute(driver, data, attribute, pointer);
  });
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                               CUdeviceptr pointer) {
  return passing([&](Driver& driver) -> CUresult {
    Allocation a;
    if (!value || !driver.memory.find(pointer, 1, a)) return CUDA_ERROR_INVALID_VALUE;
    if (a.kind == Kind::kMapped) return CUDA_ERROR_NOT_SUPPORTED;
    if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    return driver.memory.set_sync_memops(pointer, *static_cast<const unsigned char*>(value) != 0);
  });
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr pointer) {
  return passing([&](Driver& driver) -> CUresult {
    if (!attributes || !data || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; ++i) {
      if (!data[i]) return CUDA_ERROR_INVALID_VALUE;
      if (pointer_attribute(driver, data[i], attributes[i], pointer) == CUDA_SUCCESS) continue;
      default_attribute(data[i], attributes[i]);
      // All that is reserved, of what is not mapped as well.
      const auto [start, size] = driver.memory.reservation_at(pointer);
      if (attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) answer(data[i], start);
      if (attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE) answer(data[i], std::size_t{size});
    }
    return CUDA_SUCCESS;
  });
}
