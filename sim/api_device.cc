// Devices and contexts.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim/api.h"
#include "sim/driver.h"
#include "sim/objects.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

// What a data-centre GPU of the Hopper kind says, as far as programs ask.
int attribute_value(const GpuSpec& gpu, CUdevice_attribute attribute, bool& known) {
  known = true;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 49152;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 1980000;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return static_cast<int>(gpu.pci_bus);
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return 52428800;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return 233472;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return 32;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_TCC_DRIVER:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
      return 0;
  }
  known = false;
  return 0;
}

// A function on one device that waits while the process is locked, and one that does not.
template <class F>
CUresult on_device(CUdevice device, F&& body) {
  return gated([&](Driver& driver) -> CUresult {
    if (!driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return body(driver, driver.devices[Driver::ordinal_index(device)]);
  });
}

template <class F>
CUresult ask_device(CUdevice device, F&& body) {
  return passing([&](Driver& driver) -> CUresult {
    if (!driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return body(driver, driver.devices[Driver::ordinal_index(device)]);
  });
}

CUresult copy_text(const std::string& text, char* out, int length) {
  if (!out || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(out, static_cast<std::size_t>(length), "%s", text.c_str());
  return CUDA_SUCCESS;
}

CUresult new_context(Driver& driver, CUdevice device, unsigned flags, bool primary, Context*& out) {
  const int slot = driver.devices[Driver::ordinal_index(device)].slot;
  if (auto rc = suffer(driver.next_plan(FaultAction::kContext)); rc != CUDA_SUCCESS) return rc;
  if (!driver.memory.hold(slot)) return CUDA_ERROR_UNKNOWN;
  auto* context = new Context;
  context->device = device;
  context->flags = flags;
  context->primary = primary;
  context->default_stream.context = context;
  context->default_stream.is_default = true;
  context->default_stream.lane = std::make_shared<Lane>(driver.outstanding);
  driver.contexts.insert(context);
  note_switch(driver.memory.dir(), driver.memory.gpu(slot).uuid);
  out = context;
  return CUDA_SUCCESS;
}

// Everything of a context goes with it, after its work.
void destroy_context(Driver& driver, Context& context) {
  context.synchronize();
  context.destroyed = true;
  destroy_streams(driver, context);
  unload_modules(driver, context);
  {
    std::lock_guard lock(driver.mutex);
    for (auto* event : context.events)
      driver.events.erase(event);
    context.events.clear();
    driver.contexts.erase(&context);
  }
  driver.memory.free_all(&context);
  driver.memory.unhold(driver.devices[Driver::ordinal_index(context.device)].slot);
}

Context* find_context(Driver& driver, CUcontext handle) {
  auto* context = reinterpret_cast<Context*>(handle);
  std::lock_guard lock(driver.mutex);
  return driver.contexts.contains(context) ? context : nullptr;
}

CUcontext handle_of(Context* context) { return reinterpret_cast<CUcontext>(context); }

CUresult create_context(CUcontext* out, unsigned flags, CUdevice device) {
  if (!out || flags > CU_CTX_FLAGS_MASK) return CUDA_ERROR_INVALID_VALUE;
  return on_device(device, [&](Driver& driver, Device&) -> CUresult {
    Context* context = nullptr;
    {
      std::lock_guard lock(driver.mutex);
      if (auto rc = new_context(driver, device, flags, false, context); rc != CUDA_SUCCESS) {
        return rc;
      }
    }
    if (!CurrentContext::push(context)) return CUDA_ERROR_INVALID_CONTEXT;
    *out = handle_of(context);
    return CUDA_SUCCESS;
  });
}

}  // namespace

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return passing([&](Driver& driver) -> CUresult {
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.valid_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetCount(int* count) {
  return passing([&](Driver& driver) -> CUresult {
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<int>(driver.devices.size());
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return ask_device(device, [&](Driver& driver, Device&) {
    return copy_text(driver.gpu(device).name, name, length);
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return ask_device(device, [&](Driver& driver, Device&) -> CUresult {
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    *uuid = driver.gpu(device).uuid;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }

CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  return ask_device(device, [&](Driver& driver, Device&) -> CUresult {
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    *bytes = driver.gpu(device).capacity;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetPCIBusId(char* bus_id, int length, CUdevice device) {
  return ask_device(device, [&](Driver& driver, Device&) {
    return copy_text(pci_text(driver.gpu(device).pci_bus), bus_id, length);
  });
}

CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* bus_id) {
  return passing([&](Driver& driver) -> CUresult {
    if (!device || !bus_id) return CUDA_ERROR_INVALID_VALUE;
    unsigned long parts[3] = {};
    const char* at = bus_id;
    for (auto& part : parts) {
      if (&part != parts && *at++ != ':') return CUDA_ERROR_INVALID_VALUE;
      char* end = nullptr;
      part = std::strtoul(at, &end, 16);
      if (end == at) return CUDA_ERROR_INVALID_VALUE;
      at = end;
    }
    const auto [domain, bus, number] = parts;
    for (std::size_t i = 0; i < driver.devices.size(); ++i) {
      if (domain || number || driver.gpu(static_cast<int>(i)).pci_bus != bus) continue;
      *device = static_cast<CUdevice>(i);
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_DEVICE;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return ask_device(device, [&](Driver& driver, Device&) -> CUresult {
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    bool known = false;
    const int got = attribute_value(driver.gpu(device), attribute, known);
    if (!known) return CUDA_ERROR_INVALID_VALUE;
    *value = got;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  return ask_device(device, [&](Driver&, Device&) -> CUresult {
    if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
    *major = 9;
    *minor = 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return ask_device(device, [&](Driver& driver, Device&) -> CUresult {
    if (!can) return CUDA_ERROR_INVALID_VALUE;
    if (!driver.valid_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  // Only making a context waits for the lock; one that is there is handed out.
  auto retain = [&](Driver& driver, Device& d, bool make) -> CUresult {
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    if (!d.primary) {
      if (!make) return CUDA_ERROR_NOT_READY;
      auto rc = new_context(driver, device, d.primary_flags, true, d.primary);
      if (rc != CUDA_SUCCESS) return rc;
    }
    ++d.primary_references;
    *context = handle_of(d.primary);
    return CUDA_SUCCESS;
  };
  const auto rc = ask_device(
      device, [&](Driver& driver, Device& d) -> CUresult { return retain(driver, d, false); });
  if (rc != CUDA_ERROR_NOT_READY) return rc;
  return on_device(device,
                   [&](Driver& driver, Device& d) -> CUresult { return retain(driver, d, true); });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return on_device(device, [&](Driver& driver, Device& d) -> CUresult {
    Context* last = nullptr;
    {
      std::lock_guard lock(driver.mutex);
      if (d.primary_references == 0) return CUDA_ERROR_INVALID_CONTEXT;
      if (--d.primary_references == 0) std::swap(last, d.primary);
    }
    if (last) destroy_context(driver, *last);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return on_device(device, [&](Driver& driver, Device& d) -> CUresult {
    Context* last = nullptr;
    {
      std::lock_guard lock(driver.mutex);
      std::swap(last, d.primary);
      d.primary_references = 0;
    }
    if (last) destroy_context(driver, *last);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return ask_device(device, [&](Driver& driver, Device& d) -> CUresult {
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    *flags = d.primary_flags;
    *active = d.primary ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
  return on_device(device, [&](Driver& driver, Device& d) -> CUresult {
    if (flags > CU_CTX_FLAGS_MASK) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver.mutex);
    d.primary_flags = flags;
    if (d.primary) d.primary->flags = flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned int flags, CUdevice device) {
  return create_context(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* params, unsigned int flags,
                        CUdevice device) {
  if (params && (params->numExecAffinityParams || params->cigParams)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return create_context(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  return gated([&](Driver& driver) -> CUresult {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    auto* context = find_context(driver, handle);
    if (!context || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    if (CurrentContext::get() == context) CurrentContext::pop(context);
    destroy_context(driver, *context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  return passing([&](Driver& driver) -> CUresult {
    auto* context = find_context(driver, handle);
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    return CurrentContext::push(context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* handle) {
  return passing([&](Driver&) -> CUresult {
    Context* context = nullptr;
    if (!CurrentContext::pop(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle) *handle = handle_of(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext handle) {
  return passing([&](Driver& driver) -> CUresult {
    auto* context = handle ? find_context(driver, handle) : nullptr;
    if (handle && !context) return CUDA_ERROR_INVALID_CONTEXT;
    CurrentContext::set(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* handle) {
  return passing([&](Driver&) -> CUresult {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    *handle = handle_of(CurrentContext::get());
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return in_context_passing([&](Driver&, Context& context) -> CUresult {
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = context.device;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetFlags(unsigned int* flags) {
  return in_context_passing([&](Driver&, Context& context) -> CUresult {
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = context.flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetFlags(unsigned int flags) {
  return in_context_passing([&](Driver&, Context& context) -> CUresult {
    if (flags > CU_CTX_FLAGS_MASK) return CUDA_ERROR_INVALID_VALUE;
    context.flags = flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  return passing([&](Driver& driver) -> CUresult {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    if (handle ? !find_context(driver, handle) : !CurrentContext::get()) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
    *version = 3020;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return in_context_passing([&](Driver&, Context&) -> CUresult {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
  });
}

// As an H100 answers (driver 580.159.04) for the sizes of the stack, of what kernels print, and of
// what they allocate. Not what it does beyond, such as growing the stack for a kernel.
CUresult cuCtxGetLimit(std::size_t* value, CUlimit limit) {
  return in_context_passing([&](Driver&, Context& context) -> CUresult {
    if (!value || limit >= context.limits.size()) return CUDA_ERROR_INVALID_VALUE;
    *value = context.limits[limit].load();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetLimit(CUlimit limit, std::size_t value) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (limit >= context.limits.size()) return CUDA_ERROR_INVALID_VALUE;
    if (auto rc = suffer(driver.next_plan(FaultAction::kLimit)); rc != CUDA_SUCCESS) return rc;
    context.synchronize();
    context.limits[limit].store(value);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize() {
  return in_context_passing([&](Driver& driver, Context& context) -> CUresult {
    driver.memory.touch_device();
    context.synchronize();
    trim_pools(driver);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    auto* other = find_context(driver, peer);
    if (!other || other->device == context.device) return CUDA_ERROR_INVALID_DEVICE;
    const auto bit = std::uint64_t{1} << other->device;
    return context.peers.fetch_or(bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
                                             : CUDA_SUCCESS;
  });
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    auto* other = find_context(driver, peer);
    if (!other) return CUDA_ERROR_INVALID_CONTEXT;
    const auto bit = std::uint64_t{1} << other->device;
    return context.peers.fetch_and(~bit) & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  });
}
