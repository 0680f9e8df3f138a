// The part of the CUDA driver that the mover uses, as one table, loaded at run time.
//
// Plain pointers into a library that is never unloaded; may be copied and used from any thread.
#pragma once

#include <string>

#include "abi/cuda_abi.h"
#include "base/result.h"
#include "driver/library.h"

namespace stasis::direct {

struct DeviceCalls {
  // The library is the one that load_driver() takes for this name. kDriverMissing;
  // kDriverUnsupported if it lacks a call.
  static Result<DeviceCalls> load(const std::string& name = {});

  // What `call`, a function of the driver, answered while we did `what` ("import the memory of
  // ...").
  Error error(cuda::CUresult code, const char* call, const std::string& what) const;

  cuda::fn::cuInit* init = nullptr;
  cuda::fn::cuGetErrorName* error_name = nullptr;
  cuda::fn::cuGetErrorString* error_text = nullptr;
  cuda::fn::cuDeviceGetCount* device_count = nullptr;
  cuda::fn::cuDeviceGet* device = nullptr;
  cuda::fn::cuDeviceGetUuid* uuid = nullptr;
  cuda::fn::cuDevicePrimaryCtxRetain* retain_context = nullptr;
  cuda::fn::cuDevicePrimaryCtxRelease_v2* release_context = nullptr;
  cuda::fn::cuCtxSetCurrent* set_context = nullptr;
  cuda::fn::cuMemHostRegister_v2* register_host = nullptr;
  cuda::fn::cuMemHostUnregister* unregister_host = nullptr;
  cuda::fn::cuStreamCreate* create_stream = nullptr;
  cuda::fn::cuStreamDestroy_v2* destroy_stream = nullptr;
  cuda::fn::cuStreamQuery* query_stream = nullptr;
  cuda::fn::cuMemcpyDtoHAsync_v2* copy_out = nullptr;
  cuda::fn::cuMemcpyHtoDAsync_v2* copy_in = nullptr;
  cuda::fn::cuMemcpyDtoDAsync_v2* copy_within = nullptr;
  cuda::fn::cuMemsetD8Async* fill = nullptr;
  cuda::fn::cuMemAlloc_v2* allocate = nullptr;
  cuda::fn::cuMemFree_v2* free = nullptr;
  cuda::fn::cuMemAddressReserve* reserve = nullptr;
  cuda::fn::cuMemAddressFree* unreserve = nullptr;
  cuda::fn::cuMemMap* map = nullptr;
  cuda::fn::cuMemUnmap* unmap = nullptr;
  cuda::fn::cuMemSetAccess* set_access = nullptr;
  cuda::fn::cuMemRelease* release = nullptr;
  cuda::fn::cuMemImportFromShareableHandle* import = nullptr;
  cuda::fn::cuMemGetAllocationPropertiesFromHandle* properties = nullptr;
  // Only digests need these, and digests are optional; null if the driver has none.
  cuda::fn::cuModuleLoadData* load_module = nullptr;
  cuda::fn::cuModuleGetFunction* find_function = nullptr;
  cuda::fn::cuLaunchKernel* launch = nullptr;
};

}  // namespace stasis::direct
