// The list of everything that the simulated driver exports: one line per symbol, with the name that
// cuGetProcAddress knows it by and the CUDA version that brought it.
//
// Every function is defined once, in an api_*.cc by theme; the declarations below make the compiler
// compare its signature with cuda_abi.h. What is exported by its name is an entry point that begins
// as the real driver's do and goes on to it (entry_points.cc). Threads: as the driver's own
// functions, any.
#pragma once

#include "abi/cuda_abi.h"

// clang-format off
#define STASIS_SIM_API(X)                                                                   \
  X(cuInit, "cuInit", 2000)                                                                 \
  X(cuDriverGetVersion, "cuDriverGetVersion", 2020)                                         \
  X(cuGetErrorName, "cuGetErrorName", 6000)                                                 \
  X(cuGetErrorString, "cuGetErrorString", 6000)                                             \
  X(cuGetProcAddress_v2, "cuGetProcAddress", 12000)                                         \
  X(cuDeviceGet, "cuDeviceGet", 2000)                                                       \
  X(cuDeviceGetCount, "cuDeviceGetCount", 2000)                                             \
  X(cuDeviceGetName, "cuDeviceGetName", 2000)                                               \
  X(cuDeviceGetUuid, "cuDeviceGetUuid", 9020)                                               \
  X(cuDeviceGetUuid_v2, "cuDeviceGetUuid", 11040)                                           \
  X(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020)                                          \
  X(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", 4010)                                       \
  X(cuDeviceGetByPCIBusId, "cuDeviceGetByPCIBusId", 4010)                                   \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000)                                     \
  X(cuDeviceComputeCapability, "cuDeviceComputeCapability", 2000)                           \
  X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", 4000)                                   \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000)                             \
  X(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000)                       \
  X(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000)                           \
  X(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", 7000)                         \
  X(cuDevicePrimaryCtxSetFlags_v2, "cuDevicePrimaryCtxSetFlags", 11000)                     \
  X(cuCtxCreate_v2, "cuCtxCreate", 3020)                                                    \
  X(cuCtxCreate_v4, "cuCtxCreate", 12050)                                                   \
  X(cuCtxDestroy_v2, "cuCtxDestroy", 4000)                                                  \
  X(cuCtxPushCurrent_v2, "cuCtxPushCurrent", 4000)                                          \
  X(cuCtxPopCurrent_v2, "cuCtxPopCurrent", 4000)                                            \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", 4000)                                               \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", 4000)                                               \
  X(cuCtxGetDevice, "cuCtxGetDevice", 2000)                                                 \
  X(cuCtxGetFlags, "cuCtxGetFlags", 7000)                                                   \
  X(cuCtxSetFlags, "cuCtxSetFlags", 12010)                                                  \
  X(cuCtxGetApiVersion, "cuCtxGetApiVersion", 3020)                                         \
  X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", 5050)                       \
  X(cuCtxGetLimit, "cuCtxGetLimit", 3010)                                                   \
  X(cuCtxSetLimit, "cuCtxSetLimit", 3010)                                                   \
  X(cuCtxSynchronize, "cuCtxSynchronize", 2000)                                             \
  X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000)                                   \
  X(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", 4000)                                 \
  X(cuMemGetInfo_v2, "cuMemGetInfo", 3020)                                                  \
  X(cuMemAlloc_v2, "cuMemAlloc", 3020)                                                      \
  X(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020)                                            \
  X(cuMemFree_v2, "cuMemFree", 3020)                                                        \
  X(cuMemGetAddressRange_v2, "cuMemGetAddressRange", 3020)                                  \
  X(cuMemAllocHost_v2, "cuMemAllocHost", 3020)                                              \
  X(cuMemFreeHost, "cuMemFreeHost", 2000)                                                   \
  X(cuMemHostAlloc, "cuMemHostAlloc", 2020)                                                 \
  X(cuMemHostRegister_v2, "cuMemHostRegister", 6050)                                        \
  X(cuMemHostUnregister, "cuMemHostUnregister", 4000)                                       \
  X(cuMemHostGetDevicePointer_v2, "cuMemHostGetDevicePointer", 3020)                        \
  X(cuMemHostGetFlags, "cuMemHostGetFlags", 2030)                                           \
  X(cuMemAllocManaged, "cuMemAllocManaged", 6000)                                           \
  X(cuMemAdvise, "cuMemAdvise", 8000)                                                       \
  X(cuMemRangeGetAttribute, "cuMemRangeGetAttribute", 8000)                                 \
  X(cuMemPrefetchAsync, "cuMemPrefetchAsync", 8000)                                         \
  X(cuStreamAttachMemAsync, "cuStreamAttachMemAsync", 6000)                                 \
  X(cuMemAllocAsync, "cuMemAllocAsync", 11020)                                              \
  X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020)                              \
  X(cuMemFreeAsync, "cuMemFreeAsync", 11020)                                                \
  X(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020)                          \
  X(cuDeviceGetMemPool, "cuDeviceGetMemPool", 11020)                                        \
  X(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020)                                        \
  X(cuMemPoolCreate, "cuMemPoolCreate", 11020)                                              \
  X(cuMemPoolDestroy, "cuMemPoolDestroy", 11020)                                            \
  X(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020)                                              \
  X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020)                                  \
  X(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020)                                  \
  X(cuMemPoolSetAccess, "cuMemPoolSetAccess", 11020)                                        \
  X(cuMemPoolGetAccess, "cuMemPoolGetAccess", 11020)                                        \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010)                                           \
  X(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000)                                     \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010)                                       \
  X(cuPointerGetAttribute, "cuPointerGetAttribute", 4000)                                   \
  X(cuPointerGetAttributes, "cuPointerGetAttributes", 7000)                                 \
  X(cuPointerSetAttribute, "cuPointerSetAttribute", 6000)                                   \
  X(cuMemcpy, "cuMemcpy", 4000)                                                             \
  X(cuMemcpyAsync, "cuMemcpyAsync", 4000)                                                   \
  X(cuMemcpyHtoD_v2, "cuMemcpyHtoD", 3020)                                                  \
  X(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", 3020)                                        \
  X(cuMemcpyDtoH_v2, "cuMemcpyDtoH", 3020)                                                  \
  X(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", 3020)                                        \
  X(cuMemcpyDtoD_v2, "cuMemcpyDtoD", 3020)                                                  \
  X(cuMemcpyDtoDAsync_v2, "cuMemcpyDtoDAsync", 3020)                                        \
  X(cuMemcpy2D_v2, "cuMemcpy2D", 3020)                                                      \
  X(cuMemcpy2DUnaligned_v2, "cuMemcpy2DUnaligned", 3020)                                    \
  X(cuMemcpy2DAsync_v2, "cuMemcpy2DAsync", 3020)                                            \
  X(cuMemcpyPeer, "cuMemcpyPeer", 4000)                                                     \
  X(cuMemcpyPeerAsync, "cuMemcpyPeerAsync", 4000)                                           \
  X(cuMemsetD8_v2, "cuMemsetD8", 3020)                                                      \
  X(cuMemsetD16_v2, "cuMemsetD16", 3020)                                                    \
  X(cuMemsetD32_v2, "cuMemsetD32", 3020)                                                    \
  X(cuMemsetD8Async, "cuMemsetD8Async", 3020)                                               \
  X(cuMemsetD16Async, "cuMemsetD16Async", 3020)                                             \
  X(cuMemsetD32Async, "cuMemsetD32Async", 3020)                                             \
  X(cuStreamCreate, "cuStreamCreate", 2000)                                                 \
  X(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", 5050)                         \
  X(cuStreamDestroy_v2, "cuStreamDestroy", 4000)                                            \
  X(cuStreamQuery, "cuStreamQuery", 2000)                                                   \
  X(cuStreamSynchronize, "cuStreamSynchronize", 2000)                                       \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", 3020)                                           \
  X(cuStreamGetFlags, "cuStreamGetFlags", 5050)                                             \
  X(cuStreamGetPriority, "cuStreamGetPriority", 5050)                                       \
  X(cuStreamGetCtx, "cuStreamGetCtx", 9020)                                                 \
  X(cuStreamGetId, "cuStreamGetId", 12000)                                                  \
  X(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010)                                 \
  X(cuStreamEndCapture, "cuStreamEndCapture", 10000)                                        \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", 10000)                                      \
  X(cuGraphInstantiateWithFlags, "cuGraphInstantiate", 12000)                               \
  X(cuGraphLaunch, "cuGraphLaunch", 10000)                                                  \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", 10000)                                        \
  X(cuGraphDestroy, "cuGraphDestroy", 10000)                                                \
  X(cuStreamAddCallback, "cuStreamAddCallback", 5000)                                       \
  X(cuLaunchHostFunc, "cuLaunchHostFunc", 10000)                                            \
  X(cuEventCreate, "cuEventCreate", 2000)                                                   \
  X(cuEventDestroy_v2, "cuEventDestroy", 4000)                                              \
  X(cuEventRecord, "cuEventRecord", 2000)                                                   \
  X(cuEventRecordWithFlags, "cuEventRecordWithFlags", 11010)                                \
  X(cuEventQuery, "cuEventQuery", 2000)                                                     \
  X(cuEventSynchronize, "cuEventSynchronize", 2000)                                         \
  X(cuEventElapsedTime, "cuEventElapsedTime", 2000)                                         \
  X(cuEventElapsedTime_v2, "cuEventElapsedTime", 12080)                                     \
  X(cuModuleLoadData, "cuModuleLoadData", 2000)                                             \
  X(cuModuleLoadDataEx, "cuModuleLoadDataEx", 2010)                                         \
  X(cuModuleUnload, "cuModuleUnload", 2000)                                                 \
  X(cuModuleGetFunction, "cuModuleGetFunction", 2000)                                       \
  X(cuModuleGetGlobal_v2, "cuModuleGetGlobal", 3020)                                        \
  X(cuFuncGetAttribute, "cuFuncGetAttribute", 2020)                                         \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", 9000)                                         \
  X(cuLaunchKernel, "cuLaunchKernel", 4000)                                                 \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", 11060)                                            \
  X(cuMemAddressReserve, "cuMemAddressReserve", 10020)                                      \
  X(cuMemAddressFree, "cuMemAddressFree", 10020)                                            \
  X(cuMemCreate, "cuMemCreate", 10020)                                                      \
  X(cuMemRelease, "cuMemRelease", 10020)                                                    \
  X(cuMemMap, "cuMemMap", 10020)                                                            \
  X(cuMemUnmap, "cuMemUnmap", 10020)                                                        \
  X(cuMemSetAccess, "cuMemSetAccess", 10020)                                                \
  X(cuMemGetAccess, "cuMemGetAccess", 10020)                                                \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020)                  \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020)                    \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020)                \
  X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000)                      \
  X(cuMulticastCreate, "cuMulticastCreate", 12010)                                          \
  X(cuMulticastAddDevice, "cuMulticastAddDevice", 12010)                                    \
  X(cuMulticastBindMem, "cuMulticastBindMem", 12010)                                        \
  X(cuMulticastBindAddr, "cuMulticastBindAddr", 12010)                                      \
  X(cuMulticastUnbind, "cuMulticastUnbind", 12010)                                          \
  X(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle", 10020) \
  X(cuCheckpointProcessGetState, "cuCheckpointProcessGetState", 12080)                      \
  X(cuCheckpointProcessGetRestoreThreadId, "cuCheckpointProcessGetRestoreThreadId", 12080)  \
  X(cuCheckpointProcessLock, "cuCheckpointProcessLock", 12080)                              \
  X(cuCheckpointProcessCheckpoint, "cuCheckpointProcessCheckpoint", 12080)                  \
  X(cuCheckpointProcessRestore, "cuCheckpointProcessRestore", 12080)                        \
  X(cuCheckpointProcessUnlock, "cuCheckpointProcessUnlock", 12080)
// clang-format on

extern "C" {
#define STASIS_SIM_DECLARE(symbol, name, version)          \
  stasis::cuda::fn::symbol symbol __asm__("sim_" #symbol); \
  void stasis_sim_entry_##symbol() __asm__(#symbol);
STASIS_SIM_API(STASIS_SIM_DECLARE)
#undef STASIS_SIM_DECLARE
stasis::cuda::fn::cuGetProcAddress_v1 cuGetProcAddress __asm__("sim_cuGetProcAddress");
// NOLINTNEXTLINE(readability-identifier-naming): as those of the list
void stasis_sim_entry_cuGetProcAddress() __asm__("cuGetProcAddress");
// Not in the list: programs that ask for it by cuGetProcAddress would use it for more than is
// simulated.
stasis::cuda::CUresult cuMemGetHandleForAddressRange(
    void* handle, stasis::cuda::CUdeviceptr start, std::size_t size, int type,
    unsigned long long flags) __asm__("sim_cuMemGetHandleForAddressRange");
}
