// Long because it is a list, with one answer for each function that the agent calls.
#include "fake_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "agent.h"
#include "driver_mmap.h"
#include "eviction.h"
#include "eviction_internal.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

FakeDriver g_fake;

// In the middle of a map, nothing starts or ends.
bool cuts(CUdeviceptr address, std::size_t size) {
  return std::any_of(g_fake.maps.begin(), g_fake.maps.end(), [&](const auto& entry) {
    return entry.first < address + size && address < entry.first + entry.second.size;
  });
}

void drop_if_unused(CUmemGenericAllocationHandle handle) {
  const bool mapped = std::any_of(g_fake.maps.begin(), g_fake.maps.end(),
                                  [&](const auto& entry) { return entry.second.handle == handle; });
  if (!mapped && g_fake.released.contains(handle)) g_fake.objects.erase(handle);
}

#define ENTER(name) \
  if (!g_fake.enter(#name)) return CUDA_ERROR_OUT_OF_MEMORY

CUresult get_current(CUcontext* context) {
  ENTER(cuCtxGetCurrent);
  *context = g_fake.current.empty() ? nullptr : g_fake.current.back();
  return CUDA_SUCCESS;
}
CUresult push_current(CUcontext context) {
  ENTER(cuCtxPushCurrent);
  if (!g_fake.contexts.contains(context)) return CUDA_ERROR_INVALID_CONTEXT;
  g_fake.current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult pop_current(CUcontext* context) {
  ENTER(cuCtxPopCurrent);
  *context = g_fake.current.back();
  g_fake.current.pop_back();
  return CUDA_SUCCESS;
}
// Of another thread: this driver knows of one.
CUresult set_current(CUcontext) { return CUDA_SUCCESS; }
CUresult get_device(CUdevice* device) {
  ENTER(cuCtxGetDevice);
  if (g_fake.current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = g_fake.contexts[g_fake.current.back()];
  return CUDA_SUCCESS;
}
CUresult synchronize() {
  ENTER(cuCtxSynchronize);
  return g_fake.current.empty() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
CUresult get_limit(std::size_t* value, CUlimit) {
  ENTER(cuCtxGetLimit);
  *value = g_fake.stack_size();
  return CUDA_SUCCESS;
}
CUresult set_limit(CUlimit, std::size_t value) {
  ENTER(cuCtxSetLimit);
  g_fake.stack_size() = value;
  return CUDA_SUCCESS;
}
CUresult get_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = 1;
  if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
    *value = !g_fake.without_rdma.contains(device);
  if (attribute == CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)
    *value = !g_fake.without_concurrent_access.contains(device);
  return CUDA_SUCCESS;
}
CUresult get_granularity(std::size_t* size, const CUmemAllocationProp*,
                         CUmemAllocationGranularity_flags) {
  *size = std::size_t{2} << 20;
  return CUDA_SUCCESS;
}
CUresult alloc(CUdeviceptr* address, std::size_t size) {
  ENTER(cuMemAlloc);
  *address = g_fake.next_address;
  g_fake.next_address += size + 512;
  g_fake.own_allocations.insert(*address);
  return CUDA_SUCCESS;
}
CUresult alloc_pitch(CUdeviceptr* address, std::size_t* pitch, std::size_t width,
                     std::size_t height, unsigned) {
  ENTER(cuMemAllocPitch);
  *pitch = (width + 511) / 512 * 512;
  return alloc(address, *pitch * height);
}
// As real memory, since the processor reaches it, where mmap() is steered to or anywhere.
CUresult alloc_managed(CUdeviceptr* address, std::size_t size, unsigned) {
  ENTER(cuMemAllocManaged);
  constexpr std::size_t kArea = std::size_t{32} << 20;
  const auto steered = std::exchange(g_fake.steered, 0);
  void* raw = ::mmap(
      reinterpret_cast<void*>(steered), steered ? size : size + kArea, PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | (steered ? MAP_FIXED_NOREPLACE : 0), -1, 0);
  if (raw == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto from = reinterpret_cast<CUdeviceptr>(raw);
  *address = (from + kArea - 1) / kArea * kArea;
  if (*address > from) ::munmap(raw, *address - from);
  if (!steered) ::munmap(reinterpret_cast<void*>(*address + size), from + kArea - *address);
  g_fake.managed[*address] = size;
  return CUDA_SUCCESS;
}
CUresult advise(CUdeviceptr address, std::size_t size, CUmem_advise advice, CUdevice device) {
  ENTER(cuMemAdvise);
  g_fake.advice.push_back({address, size, advice, device});
  return CUDA_SUCCESS;
}
CUresult advise_for_place(CUdeviceptr address, std::size_t size, CUmem_advise advice,
                          std::uint64_t location) {
  return advise(address, size, advice, static_cast<CUdevice>(location >> 32));
}
CUresult prefetch(CUdeviceptr address, std::size_t size, CUdevice device, CUstream) {
  ENTER(cuMemPrefetchAsync);
  g_fake.prefetched.push_back({address, size, {}, device});
  return CUDA_SUCCESS;
}
CUresult attach_to_stream(CUstream stream, CUdeviceptr address, std::size_t size, unsigned flags) {
  ENTER(cuStreamAttachMemAsync);
  g_fake.attached.push_back({stream, address, size, flags});
  return CUDA_SUCCESS;
}
CUresult copy_to_device(CUdeviceptr to, const void* from, std::size_t size) {
  ENTER(cuMemcpyHtoD);
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return CUDA_SUCCESS;
}
CUresult free_own(CUdeviceptr address) {
  ENTER(cuMemFree);
  if (const auto managed = g_fake.managed.extract(address)) {
    ::munmap(reinterpret_cast<void*>(address), managed.mapped());
    return CUDA_SUCCESS;
  }
  return g_fake.own_allocations.erase(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult free_async(CUdeviceptr address, CUstream) {
  ENTER(cuMemFreeAsync);
  return g_fake.own_allocations.erase(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult reserve(CUdeviceptr* address, std::size_t size, std::size_t, CUdeviceptr,
                 unsigned long long) {
  ENTER(cuMemAddressReserve);
  *address = g_fake.next_address = (g_fake.next_address + (1 << 21)) >> 21 << 21;
  g_fake.next_address += size;
  g_fake.reserved[*address] = size;
  return CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr address, std::size_t size) {
  ENTER(cuMemAddressFree);
  if (cuts(address, size)) return CUDA_ERROR_INVALID_VALUE;
  return g_fake.reserved.erase(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult create(CUmemGenericAllocationHandle* handle, std::size_t size,
                const CUmemAllocationProp* prop, unsigned long long) {
  ENTER(cuMemCreate);
  if (prop->allocFlags.usage && g_fake.without_decompression.contains(prop->location.id))
    return CUDA_ERROR_INVALID_VALUE;
  std::size_t live = size;
  for (const auto& [object, bytes] : g_fake.objects)
    live += bytes;
  if (live > g_fake.capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  g_fake.created.push_back(*prop);
  *handle = g_fake.next_handle++;
  g_fake.objects[*handle] = size;
  return CUDA_SUCCESS;
}
CUresult release_handle(CUmemGenericAllocationHandle handle) {
  ENTER(cuMemRelease);
  if (!g_fake.objects.contains(handle) || !g_fake.released.insert(handle).second)
    return CUDA_ERROR_INVALID_VALUE;
  drop_if_unused(handle);
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr address, std::size_t size, std::size_t offset,
             CUmemGenericAllocationHandle handle, unsigned long long) {
  ENTER(cuMemMap);
  const auto object = g_fake.objects.find(handle);
  if (object == g_fake.objects.end() || g_fake.released.contains(handle) ||
      offset + size > object->second || cuts(address, size))
    return CUDA_ERROR_INVALID_VALUE;
  g_fake.maps[address] = {size, offset, handle};
  return CUDA_SUCCESS;
}
// Also in parts: stricter drivers only see less.
CUresult unmap(CUdeviceptr address, std::size_t size) {
  ENTER(cuMemUnmap);
  std::set<CUmemGenericAllocationHandle> touched;
  const auto maps = g_fake.maps;
  for (const auto& [at, one] : maps) {
    if (at >= address + size || address >= at + one.size) continue;
    g_fake.maps.erase(at);
    touched.insert(one.handle);
    if (at < address) g_fake.maps[at] = {address - at, one.offset, one.handle};
    if (at + one.size > address + size) {
      g_fake.maps[address + size] = {at + one.size - address - size,
                                     one.offset + (address + size - at), one.handle};
    }
  }
  if (touched.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto handle : touched)
    drop_if_unused(handle);
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* rights,
                    std::size_t count) {
  ENTER(cuMemSetAccess);
  if (!cuts(address, size)) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i)
    if (g_fake.without_rights.contains(rights[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
  for (std::size_t i = 0; i < count; ++i)
    g_fake.rights.emplace_back(address, rights[i]);
  return CUDA_SUCCESS;
}
CUresult export_handle(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                       unsigned long long) {
  ENTER(cuMemExportToShareableHandle);
  if (!g_fake.objects.contains(handle) || g_fake.unexportable.contains(handle))
    return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(fd) = g_fake.exported < 0 ? -1 : ::dup(g_fake.exported);
  return CUDA_SUCCESS;
}
CUresult create_context(CUcontext* context, unsigned, CUdevice device) {
  ENTER(cuCtxCreate);
  *context = reinterpret_cast<CUcontext>(g_fake.next_handle++ << 8);
  g_fake.contexts[*context] = device;
  g_fake.current.push_back(*context);
  return CUDA_SUCCESS;
}
CUresult destroy_context(CUcontext context) {
  ENTER(cuCtxDestroy);
  std::erase(g_fake.current, context);
  return g_fake.contexts.erase(context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult detach_context(CUcontext context) {
  ENTER(cuCtxDetach);
  return destroy_context(context);
}
CUresult attach_context(CUcontext* context, unsigned) {
  ENTER(cuCtxAttach);
  *context = g_fake.current.back();
  return CUDA_SUCCESS;
}
CUresult create_green(CUgreenCtx* green, void*, CUdevice device, unsigned) {
  ENTER(cuGreenCtxCreate);
  *green = reinterpret_cast<CUgreenCtx>(g_fake.next_handle++ << 8);
  g_fake.contexts[reinterpret_cast<CUcontext>(*green)] = device;
  return CUDA_SUCCESS;
}
CUresult destroy_green(CUgreenCtx green) {
  ENTER(cuGreenCtxDestroy);
  g_fake.contexts.erase(reinterpret_cast<CUcontext>(green));
  return CUDA_SUCCESS;
}
CUresult context_of_green(CUcontext* context, CUgreenCtx green) {
  ENTER(cuCtxFromGreenCtx);
  *context = reinterpret_cast<CUcontext>(green);
  return CUDA_SUCCESS;
}
CUresult retain_primary(CUcontext* context, CUdevice) {
  ENTER(cuDevicePrimaryCtxRetain);
  *context = FakeDriver::kPrimary;
  return CUDA_SUCCESS;
}
CUresult release_primary(CUdevice) {
  ENTER(cuDevicePrimaryCtxRelease);
  return CUDA_SUCCESS;
}
CUresult primary_state(CUdevice, unsigned* flags, int* active) {
  ENTER(cuDevicePrimaryCtxGetState);
  *flags = 0;
  *active = g_fake.primary_active;
  return CUDA_SUCCESS;
}
CUresult get_id(CUcontext context, unsigned long long* id) {
  ENTER(cuCtxGetId);
  *id = context == FakeDriver::kPrimary ? g_fake.primary_id
                                        : reinterpret_cast<unsigned long long>(context);
  return CUDA_SUCCESS;
}
CUresult enable_peer(CUcontext, unsigned) {
  ENTER(cuCtxEnablePeerAccess);
  return CUDA_SUCCESS;
}
CUresult end_capture(CUstream, void**) {
  ENTER(cuStreamEndCapture);
  return CUDA_SUCCESS;
}
CUresult context_of_stream(CUstream stream, CUcontext* context) {
  ENTER(cuStreamGetCtx);
  const auto at = g_fake.stream_contexts.find(stream);
  if (at == g_fake.stream_contexts.end()) return get_current(context);
  *context = at->second;
  return CUDA_SUCCESS;
}
CUresult reset_primary(CUdevice) {
  ENTER(cuDevicePrimaryCtxReset);
  return CUDA_SUCCESS;
}
CUresult destroy_stream(CUstream) {
  ENTER(cuStreamDestroy);
  return CUDA_SUCCESS;
}
// As large as any caller says it is.
CUresult import_handle(CUmemGenericAllocationHandle* handle, void*, CUmemAllocationHandleType) {
  ENTER(cuMemImportFromShareableHandle);
  *handle = g_fake.next_handle++;
  g_fake.objects[*handle] = std::size_t{1} << 40;
  return CUDA_SUCCESS;
}
CUresult bind_memory(CUmemGenericAllocationHandle, std::size_t, CUmemGenericAllocationHandle memory,
                     std::size_t, std::size_t, unsigned long long) {
  return g_fake.objects.contains(memory) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// No test looks at the content.
CUresult copy_to_host(void* to, CUdeviceptr address, std::size_t size) {
  ENTER(cuMemcpyDtoH);
  const auto next = g_fake.managed.upper_bound(address);
  if (next != g_fake.managed.begin() &&
      address - std::prev(next)->first < std::prev(next)->second) {
    std::memcpy(to, reinterpret_cast<void*>(address), size);
    return CUDA_SUCCESS;
  }
  return cuts(address, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult copy_on_device(CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  ENTER(cuMemcpyDtoD);
  return cuts(to, size) && cuts(from, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult get_range(CUdeviceptr* base, std::size_t* size, CUdeviceptr pointer) {
  *base = pointer;
  *size = 0;
  return CUDA_SUCCESS;
}
CUresult get_pointer_attribute(void* data, CUpointer_attribute, CUdeviceptr) {
  *static_cast<CUcontext*>(data) = g_fake.current.empty() ? nullptr : g_fake.current.back();
  return CUDA_SUCCESS;
}
CUresult set_pointer_attribute(const void*, CUpointer_attribute, CUdeviceptr) {
  ENTER(cuPointerSetAttribute);
  return CUDA_SUCCESS;
}
CUresult get_dma_buf(void*, CUdeviceptr, std::size_t, unsigned, unsigned long long) {
  ENTER(cuMemGetHandleForAddressRange);
  return CUDA_SUCCESS;
}
// A handle is the address.
CUresult get_ipc(CUipcMemHandle* handle, CUdeviceptr address) {
  ENTER(cuIpcGetMemHandle);
  if (!g_fake.own_allocations.contains(address)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(handle->reserved, &address, sizeof address);
  return CUDA_SUCCESS;
}
CUresult open_ipc(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
  ENTER(cuIpcOpenMemHandle);
  std::memcpy(address, handle.reserved, sizeof *address);
  ++g_fake.opened[*address];
  return CUDA_SUCCESS;
}
CUresult close_ipc(CUdeviceptr address) {
  ENTER(cuIpcCloseMemHandle);
  const auto at = g_fake.opened.find(address);
  if (at == g_fake.opened.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--at->second == 0) g_fake.opened.erase(at);
  return CUDA_SUCCESS;
}
CUresult stream_id(CUstream stream, unsigned long long* id) {
  ENTER(cuStreamGetId);
  *id = reinterpret_cast<unsigned long long>(stream);
  return CUDA_SUCCESS;
}
CUresult is_capturing(CUstream stream, unsigned* status) {
  ENTER(cuStreamIsCapturing);
  *status = g_fake.captured.contains(stream);
  return CUDA_SUCCESS;
}
CUresult create_event(CUevent* event, unsigned) {
  ENTER(cuEventCreate);
  *event = reinterpret_cast<CUevent>(g_fake.next_handle++ << 8);
  g_fake.events[*event] = {};
  return CUDA_SUCCESS;
}
CUresult destroy_event(CUevent event) {
  ENTER(cuEventDestroy);
  return g_fake.events.erase(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult record_event(CUevent event, CUstream stream) {
  ENTER(cuEventRecord);
  if (!g_fake.events.contains(event)) return CUDA_ERROR_INVALID_HANDLE;
  g_fake.events[event] = {stream, ++g_fake.recorded[stream]};
  return CUDA_SUCCESS;
}
CUresult query_event(CUevent event) {
  ENTER(cuEventQuery);
  if (g_fake.query_result != CUDA_SUCCESS) return g_fake.query_result;
  const auto at = g_fake.events.find(event);
  if (at == g_fake.events.end()) return CUDA_ERROR_INVALID_HANDLE;
  return at->second.place <= g_fake.finished[at->second.stream] ? CUDA_SUCCESS
                                                                : CUDA_ERROR_NOT_READY;
}
CUresult wait_event(CUstream stream, CUevent event, unsigned) {
  ENTER(cuStreamWaitEvent);
  g_fake.waits.emplace_back(stream, event);
  return CUDA_SUCCESS;
}
CUresult synchronize_stream(CUstream stream) {
  ENTER(cuStreamSynchronize);
  g_fake.finish(stream);
  return CUDA_SUCCESS;
}
CUresult get_default_pool(CUmemoryPool* pool, CUdevice device) {
  ENTER(cuDeviceGetDefaultMemPool);
  *pool = FakeDriver::default_pool(device);
  return CUDA_SUCCESS;
}
CUresult create_pool(CUmemoryPool* pool, const CUmemPoolProps*) {
  ENTER(cuMemPoolCreate);
  *pool = reinterpret_cast<CUmemoryPool>(g_fake.next_handle++ << 8);
  return CUDA_SUCCESS;
}
CUresult destroy_pool(CUmemoryPool) {
  ENTER(cuMemPoolDestroy);
  return CUDA_SUCCESS;
}
CUresult import_pool(CUmemoryPool* pool, void*, CUmemAllocationHandleType, unsigned long long) {
  ENTER(cuMemPoolImportFromShareableHandle);
  *pool = reinterpret_cast<CUmemoryPool>(g_fake.next_handle++ << 8);
  return CUDA_SUCCESS;
}
// An address is what was exported.
CUresult import_pointer(CUdeviceptr* address, CUmemoryPool, void* data) {
  ENTER(cuMemPoolImportPointer);
  std::memcpy(address, data, sizeof *address);
  return CUDA_SUCCESS;
}
CUresult trim_pool_of_driver(CUmemoryPool, std::size_t) {
  ENTER(cuMemPoolTrimTo);
  return CUDA_SUCCESS;
}
CUresult get_pool_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  ENTER(cuMemPoolGetAttribute);
  const auto& set = g_fake.pools[pool];
  const auto at = set.find(static_cast<int>(attribute));
  if (attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    *static_cast<int*>(value) = at == set.end() ? 1 : static_cast<int>(at->second);
  else
    *static_cast<std::uint64_t*>(value) = at == set.end() ? 0 : at->second;
  return CUDA_SUCCESS;
}
CUresult set_pool_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  ENTER(cuMemPoolSetAttribute);
  g_fake.pools[pool][static_cast<int>(attribute)] =
      attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
          ? static_cast<std::uint64_t>(*static_cast<int*>(value))
          : *static_cast<std::uint64_t*>(value);
  return CUDA_SUCCESS;
}
CUresult set_pool_access(CUmemoryPool pool, const CUmemAccessDesc* rights, std::size_t count) {
  ENTER(cuMemPoolSetAccess);
  for (std::size_t i = 0; i < count; ++i)
    g_fake.pool_rights[pool].insert(rights[i].location.id);
  return CUDA_SUCCESS;
}
CUresult get_pool_access(CUmemAccess_flags* flags, CUmemoryPool pool, CUmemLocation* location) {
  ENTER(cuMemPoolGetAccess);
  *flags = g_fake.pool_rights[pool].contains(location->id) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                           : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}
CUresult count_devices(int* count) {
  *count = 2;
  return CUDA_SUCCESS;
}
CUresult get_info(std::size_t* free, std::size_t* total) {
  ENTER(cuMemGetInfo);
  std::size_t live = 0;
  for (const auto& [object, bytes] : g_fake.objects)
    live += bytes;
  *total = std::min(g_fake.capacity, std::size_t{80} << 30);
  *free = *total - std::min(*total, live);
  return CUDA_SUCCESS;
}
CUresult total_memory(std::size_t* bytes, CUdevice) {
  *bytes = std::size_t{80} << 30;
  return CUDA_SUCCESS;
}
// The driver's own pool.
CUresult alloc_async(CUdeviceptr* address, std::size_t size, CUstream) {
  ENTER(cuMemAllocAsync);
  return alloc(address, size);
}
CUresult alloc_from_pool(CUdeviceptr* address, std::size_t size, CUmemoryPool, CUstream) {
  ENTER(cuMemAllocFromPoolAsync);
  return alloc(address, size);
}
CUresult begin_capture(CUstream, unsigned) {
  ENTER(cuStreamBeginCapture);
  return CUDA_SUCCESS;
}

const DriverCalls& calls() {
  static const DriverCalls made = [] {
    DriverCalls all;
    all.cuCtxGetCurrent = &get_current;
    all.cuCtxSetCurrent = &set_current;
    all.cuCtxPushCurrent_v2 = &push_current;
    all.cuCtxPopCurrent_v2 = &pop_current;
    all.cuCtxGetDevice = &get_device;
    all.cuCtxSynchronize = &synchronize;
    all.cuCtxGetLimit = &get_limit;
    all.cuCtxSetLimit = &set_limit;
    all.cuDeviceGetAttribute = &get_attribute;
    all.cuMemGetAllocationGranularity = &get_granularity;
    all.cuMemAlloc_v2 = &alloc;
    all.cuMemAllocPitch_v2 = &alloc_pitch;
    all.cuMemAllocManaged = &alloc_managed;
    all.cuMemAdvise = &advise;
    all.cuMemAdvise_v2 = &advise_for_place;
    all.cuStreamAttachMemAsync = &attach_to_stream;
    all.cuMemPrefetchAsync = &prefetch;
    all.cuMemcpyHtoD_v2 = &copy_to_device;
    all.cuMemFree_v2 = &free_own;
    all.cuMemFreeAsync = &free_async;
    all.cuMemAllocAsync = &alloc_async;
    all.cuMemAllocFromPoolAsync = &alloc_from_pool;
    all.cuMemPoolCreate = &create_pool;
    all.cuMemPoolDestroy = &destroy_pool;
    all.cuMemPoolImportFromShareableHandle = &import_pool;
    all.cuMemPoolImportPointer = &import_pointer;
    all.cuMemPoolTrimTo = &trim_pool_of_driver;
    all.cuMemPoolGetAttribute = &get_pool_attribute;
    all.cuMemPoolSetAttribute = &set_pool_attribute;
    all.cuMemPoolSetAccess = &set_pool_access;
    all.cuMemPoolGetAccess = &get_pool_access;
    all.cuDeviceGetCount = &count_devices;
    all.cuDeviceTotalMem_v2 = &total_memory;
    all.cuMemGetInfo_v2 = &get_info;
    all.cuDeviceGetDefaultMemPool = &get_default_pool;
    all.cuDeviceGetMemPool = &get_default_pool;
    all.cuStreamGetId = &stream_id;
    all.cuStreamIsCapturing = &is_capturing;
    all.cuStreamWaitEvent = &wait_event;
    all.cuStreamSynchronize = &synchronize_stream;
    all.cuEventCreate = &create_event;
    all.cuEventDestroy_v2 = &destroy_event;
    all.cuEventRecord = &record_event;
    all.cuEventQuery = &query_event;
    all.cuMemAddressReserve = &reserve;
    all.cuMemAddressFree = &unreserve;
    all.cuMemCreate = &create;
    all.cuMemRelease = &release_handle;
    all.cuMemMap = &map;
    all.cuMemUnmap = &unmap;
    all.cuMemSetAccess = &set_access;
    all.cuMemExportToShareableHandle = &export_handle;
    all.cuCtxCreate = &create_context;
    all.cuCtxCreate_v2 = &create_context;
    all.cuCtxDestroy_v2 = &destroy_context;
    all.cuCtxAttach = &attach_context;
    all.cuCtxDetach = &detach_context;
    all.cuGreenCtxCreate = &create_green;
    all.cuGreenCtxDestroy = &destroy_green;
    all.cuCtxFromGreenCtx = &context_of_green;
    all.cuDevicePrimaryCtxRetain = &retain_primary;
    all.cuDevicePrimaryCtxRelease_v2 = &release_primary;
    all.cuDevicePrimaryCtxGetState = &primary_state;
    all.cuCtxGetId = &get_id;
    all.cuCtxEnablePeerAccess = &enable_peer;
    all.cuStreamBeginCapture_v2 = &begin_capture;
    all.cuStreamBeginCapture_v2_ptsz = &begin_capture;
    all.cuDevicePrimaryCtxReset_v2 = &reset_primary;
    all.cuStreamGetCtx = &context_of_stream;
    all.cuStreamEndCapture = &end_capture;
    all.cuStreamDestroy_v2 = &destroy_stream;
    all.cuMemImportFromShareableHandle = &import_handle;
    all.cuMulticastBindMem = &bind_memory;
    all.cuMemcpyDtoH_v2 = &copy_to_host;
    all.cuMemcpyDtoD_v2 = &copy_on_device;
    all.cuMemGetAddressRange_v2 = &get_range;
    all.cuPointerGetAttribute = &get_pointer_attribute;
    all.cuPointerSetAttribute = &set_pointer_attribute;
    all.cuMemGetHandleForAddressRange = &get_dma_buf;
    all.cuIpcGetMemHandle = &get_ipc;
    all.cuIpcOpenMemHandle_v2 = &open_ipc;
    all.cuIpcCloseMemHandle = &close_ipc;
    return all;
  }();
  return made;
}

}  // namespace

bool FakeDriver::enter(const std::string& call) {
  static std::recursive_mutex one_at_a_time;
  const std::scoped_lock lock(one_at_a_time);
  ++calls[call];
  if (tables().mutex.try_lock())
    tables().mutex.unlock();
  else
    called_with_lock.insert(call);
  if (const auto at = actions.find(call); at != actions.end()) {
    const auto action = std::move(at->second);
    actions.erase(at);
    action();
  }
  const auto at = failures.find(call);
  if (at == failures.end() || --at->second > 0) return true;
  failures.erase(at);
  return false;
}

int FakeDriver::live_objects() const { return static_cast<int>(objects.size()); }

FakeDriver& fake() { return g_fake; }

void forget_everything() {
  forget_memory_after_fork();
  g_fake = FakeDriver{};
}

const DriverCalls& driver() { return calls(); }
void* in_place_of(void* real) { return real; }
void Agent::start() {}
void Agent::start_with_import() {}
void Agent::start_with_managed() {}
void Agent::note_managed() {}
void Agent::note_services(std::uint32_t) {}
SteeredMapping::SteeredMapping(std::uintptr_t address, std::size_t bytes)
    : address_(address), bytes_(bytes) {
  if (g_fake.can_be_steered) g_fake.steered = address_;
}
SteeredMapping::~SteeredMapping() { g_fake.steered = 0; }

// No agent that comes later, no watch (intercept.cc).
void tell_watch_of_graph() {}

}  // namespace stasis::preload
