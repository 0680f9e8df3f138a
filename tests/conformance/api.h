// The driver under test, whatever library the name libcuda.so.1 leads to, by plain dlopen.
//
// Ownership: never closed. Threads: load() once, then read-only.
#pragma once

#include "abi/cuda_abi.h"

namespace stasis::conformance {

// clang-format off
#define STASIS_CONFORMANCE_API(X)                                                             \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetProcAddress_v2)                    \
  X(cuDeviceGet) X(cuDeviceGetCount) X(cuDeviceGetName) X(cuDeviceGetUuid_v2)                 \
  X(cuDeviceTotalMem_v2) X(cuDeviceGetAttribute) X(cuDeviceGetPCIBusId)                       \
  X(cuDeviceGetByPCIBusId) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2)        \
  X(cuDevicePrimaryCtxGetState) X(cuCtxCreate_v2) X(cuCtxDestroy_v2) X(cuCtxPushCurrent_v2)   \
  X(cuCtxPopCurrent_v2) X(cuCtxSetCurrent) X(cuCtxGetCurrent) X(cuCtxGetDevice)               \
  X(cuCtxSynchronize) X(cuMemGetInfo_v2) X(cuMemAlloc_v2) X(cuMemAllocPitch_v2)               \
  X(cuMemFree_v2) X(cuMemGetAddressRange_v2) X(cuMemAllocHost_v2) X(cuMemFreeHost)            \
  X(cuMemHostAlloc) X(cuMemHostRegister_v2) X(cuMemHostUnregister)                            \
  X(cuMemHostGetDevicePointer_v2) X(cuMemAllocManaged) X(cuMemAllocAsync) X(cuMemFreeAsync)   \
  X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle)                        \
  X(cuPointerGetAttribute) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2) X(cuMemcpyDtoD_v2)           \
  X(cuMemcpyHtoDAsync_v2) X(cuMemcpy2D_v2) X(cuMemsetD8_v2) X(cuMemsetD16_v2)                 \
  X(cuMemsetD32_v2) X(cuMemsetD32Async) X(cuStreamCreate) X(cuStreamDestroy_v2)               \
  X(cuStreamQuery) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamGetFlags)            \
  X(cuLaunchHostFunc) X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord) X(cuEventQuery)  \
  X(cuEventSynchronize) X(cuEventElapsedTime) X(cuModuleLoadData) X(cuModuleUnload)           \
  X(cuModuleGetFunction) X(cuModuleGetGlobal_v2) X(cuLaunchKernel) X(cuMemAddressReserve)     \
  X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap)                \
  X(cuMemSetAccess) X(cuMemGetAccess) X(cuMemGetAllocationGranularity)                        \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)                           \
  X(cuMemRetainAllocationHandle) X(cuMemGetAllocationPropertiesFromHandle)                    \
  X(cuCheckpointProcessGetState) X(cuCheckpointProcessGetRestoreThreadId)                     \
  X(cuCheckpointProcessLock) X(cuCheckpointProcessCheckpoint) X(cuCheckpointProcessRestore)   \
  X(cuCheckpointProcessUnlock)
// clang-format on

struct Api {
#define STASIS_CONFORMANCE_MEMBER(name) cuda::fn::name* name = nullptr;
  STASIS_CONFORMANCE_API(STASIS_CONFORMANCE_MEMBER)
#undef STASIS_CONFORMANCE_MEMBER
  bool simulated = false;
};

// Loads the library at the first call; ends the program if it or a function is missing.
const Api& api();

}  // namespace stasis::conformance
