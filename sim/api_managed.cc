// Managed memory: the host's pages are the device's, so all that is said of where they should be is
// only remembered.
#include "sim/api.h"
#include "sim/driver.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

CUresult cuMemAllocManaged(CUdeviceptr* pointer, std::size_t bytes, unsigned int flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!pointer || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return driver.memory.allocate_host(Kind::kManaged, context.device, bytes, &context, flags,
                                       *pointer);
  });
}

CUresult cuMemAdvise(CUdeviceptr pointer, std::size_t bytes, CUmem_advise advice, CUdevice device) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    if (advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY)
      return CUDA_ERROR_INVALID_VALUE;
    const bool device_counts = advice != CU_MEM_ADVISE_SET_READ_MOSTLY &&
                               advice != CU_MEM_ADVISE_UNSET_READ_MOSTLY &&
                               advice != CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
    if (device_counts && device != kDeviceCpu && !driver.valid_device(device))
      return CUDA_ERROR_INVALID_DEVICE;
    const auto note = [&](CUmem_range_attribute attribute, int value) {
      return driver.memory.note_managed(pointer, bytes, attribute, value);
    };
    switch (advice) {
      case CU_MEM_ADVISE_SET_READ_MOSTLY:
        return note(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 1);
      case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        return note(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 0);
      case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        return note(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, device);
      case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        return note(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, kDeviceInvalid);
      case CU_MEM_ADVISE_SET_ACCESSED_BY:
        return note(CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, device);
      case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
        return note(CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, kDeviceInvalid);
    }
    return CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuMemRangeGetAttribute(void* data, std::size_t data_bytes, CUmem_range_attribute attribute,
                                CUdeviceptr pointer, std::size_t bytes) {
  return in_context([&](Driver& driver, Context&) -> CUresult {
    int value = 0;
    if (!data || data_bytes < sizeof value) return CUDA_ERROR_INVALID_VALUE;
    const auto result = driver.memory.noted_managed(pointer, bytes, attribute, value);
    if (result != CUDA_SUCCESS) return result;
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) value = value == 1;
    *static_cast<int*>(data) = value;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPrefetchAsync(CUdeviceptr pointer, std::size_t bytes, CUdevice device,
                            CUstream stream) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!find_stream(driver, context, stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (device != kDeviceCpu && !driver.valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return driver.memory.note_managed(pointer, bytes, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
                                      device);
  });
}

CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr pointer, std::size_t bytes,
                                unsigned int flags) {
  return in_context([&](Driver& driver, Context& context) -> CUresult {
    if (!find_stream(driver, context, stream)) return CUDA_ERROR_INVALID_HANDLE;
    Allocation a;
    const bool known = flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST ||
                       (flags == CU_MEM_ATTACH_SINGLE && stream != nullptr);
    const bool whole = driver.memory.find(pointer, 1, a) && a.kind == Kind::kManaged &&
                       a.base == pointer && (bytes == 0 || bytes == a.size);
    return known && whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}
