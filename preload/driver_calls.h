// The driver's functions that the agent itself calls, by their real addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/cuda_abi.h"

namespace stasis::preload {

// Not in abi/cuda_abi.h, because only the agent meets them.
using CUmulticastHandle = unsigned long long;
using CUgreenCtx = struct CUgreenCtx_st*;
namespace fn {
using cuCtxCreate = cuda::CUresult(cuda::CUcontext*, unsigned flags, cuda::CUdevice);
using cuCtxCreate_v3 = cuda::CUresult(cuda::CUcontext*, void* affinity, int count, unsigned flags,
                                      cuda::CUdevice);
using cuMemGetHandleForAddressRange = cuda::CUresult(void* handle, cuda::CUdeviceptr, std::size_t,
                                                     unsigned type, unsigned long long flags);
using cuMemPoolImportFromShareableHandle = cuda::CUresult(cuda::CUmemoryPool*, void* handle,
                                                          cuda::CUmemAllocationHandleType,
                                                          unsigned long long flags);
using cuMemPoolImportPointer = cuda::CUresult(cuda::CUdeviceptr*, cuda::CUmemoryPool, void* data);
// CUDA 13.1 and newer.
using cuMulticastBindMem_v2 = cuda::CUresult(CUmulticastHandle, cuda::CUdevice,
                                             std::size_t mc_offset,
                                             cuda::CUmemGenericAllocationHandle, std::size_t offset,
                                             std::size_t size, unsigned long long flags);
using cuMulticastBindAddr_v2 = cuda::CUresult(CUmulticastHandle, cuda::CUdevice,
                                              std::size_t mc_offset, cuda::CUdeviceptr,
                                              std::size_t size, unsigned long long flags);
using cuMemMapArrayAsync = cuda::CUresult(void* list, unsigned count, cuda::CUstream);
using cuMemMapArrayAsync_ptsz = cuMemMapArrayAsync;
using cuDevicePrimaryCtxRelease = cuda::CUresult(cuda::CUdevice);
using cuDevicePrimaryCtxReset = cuda::CUresult(cuda::CUdevice);
using cuCtxDestroy = cuda::CUresult(cuda::CUcontext);
using cuCtxAttach = cuda::CUresult(cuda::CUcontext*, unsigned flags);
using cuCtxDetach = cuda::CUresult(cuda::CUcontext);
// CUDA 12.0 and newer.
using cuCtxGetId = cuda::CUresult(cuda::CUcontext, unsigned long long* id);
using cuGreenCtxCreate = cuda::CUresult(CUgreenCtx*, void* resources, cuda::CUdevice,
                                        unsigned flags);
using cuGreenCtxDestroy = cuda::CUresult(CUgreenCtx);
using cuCtxFromGreenCtx = cuda::CUresult(cuda::CUcontext*, CUgreenCtx);
using cuStreamBeginCapture = cuda::CUresult(cuda::CUstream);
using cuStreamBeginCapture_ptsz = cuStreamBeginCapture;
using cuStreamBeginCapture_v2 = cuda::CUresult(cuda::CUstream, unsigned mode);
using cuStreamBeginCapture_v2_ptsz = cuStreamBeginCapture_v2;
using cuStreamBeginCaptureToGraph = cuda::CUresult(cuda::CUstream, void* graph, const void* nodes,
                                                   const void* edges, std::size_t count,
                                                   unsigned mode);
using cuStreamBeginCaptureToGraph_ptsz = cuStreamBeginCaptureToGraph;
// CUDA 13.3 and newer.
using cuStreamBeginRecaptureToGraph = cuda::CUresult(cuda::CUstream, unsigned mode, void* graph,
                                                     void* callback, void* data);
using cuStreamBeginRecaptureToGraph_ptsz = cuStreamBeginRecaptureToGraph;
using cuStreamEndCapture = cuda::CUresult(cuda::CUstream, void** graph);
using cuStreamEndCapture_ptsz = cuStreamEndCapture;
using cuMemAllocAsync_ptsz = cuda::fn::cuMemAllocAsync;
using cuMemAllocFromPoolAsync_ptsz = cuda::fn::cuMemAllocFromPoolAsync;
using cuMemFreeAsync_ptsz = cuda::fn::cuMemFreeAsync;
using cuStreamSynchronize_ptsz = cuda::fn::cuStreamSynchronize;
using cuStreamIsCapturing = cuda::CUresult(cuda::CUstream, unsigned* status);
using cuCtxSynchronize_v2 = cuda::CUresult(cuda::CUcontext);
using cuStreamDestroy = cuda::CUresult(cuda::CUstream);
// CUDA 12.2 and newer. A CUmemLocation is of two words, and given in one register.
using cuMemAdvise_v2 = cuda::CUresult(cuda::CUdeviceptr, std::size_t, cuda::CUmem_advise,
                                      std::uint64_t location);
using cuMemPrefetchAsync_ptsz = cuda::fn::cuMemPrefetchAsync;
using cuMemPrefetchAsync_v2 = cuda::CUresult(cuda::CUdeviceptr, std::size_t, std::uint64_t location,
                                             unsigned flags, cuda::CUstream);
using cuMemPrefetchAsync_v2_ptsz = cuMemPrefetchAsync_v2;
using cuStreamAttachMemAsync_ptsz = cuda::fn::cuStreamAttachMemAsync;
using cuGetProcAddress = cuda::fn::cuGetProcAddress_v1;
using cuIpcOpenMemHandle = cuda::fn::cuIpcOpenMemHandle_v2;
// The rest is known already.
using namespace cuda::fn;  // NOLINT(google-build-using-namespace)
}  // namespace fn

// clang-format off
#define STASIS_AGENT_NEEDS(X)                \
  X(cuGetErrorName)                          \
  X(cuCtxGetCurrent)                         \
  X(cuCtxSetCurrent)                         \
  X(cuCtxPushCurrent_v2)                     \
  X(cuCtxPopCurrent_v2)                      \
  X(cuCtxGetDevice)                          \
  X(cuCtxFromGreenCtx)                       \
  X(cuCtxGetLimit)                           \
  X(cuCtxSetLimit)                           \
  X(cuCtxGetFlags)                           \
  X(cuCtxGetId)                              \
  X(cuCtxSetFlags)                           \
  X(cuStreamGetCtx)                          \
  X(cuStreamGetId)                           \
  X(cuStreamIsCapturing)                     \
  X(cuStreamWaitEvent)                       \
  X(cuEventCreate)                           \
  X(cuEventDestroy_v2)                       \
  X(cuEventRecord)                           \
  X(cuEventQuery)                            \
  X(cuDeviceGetAttribute)                    \
  X(cuDeviceGetUuid)                         \
  X(cuDeviceGetCount)                        \
  X(cuDeviceTotalMem_v2)                     \
  X(cuMemPoolGetAccess)                      \
  X(cuMemGetInfo_v2)                         \
  X(cuDeviceGetDefaultMemPool)               \
  X(cuDeviceGetMemPool)                      \
  X(cuDevicePrimaryCtxGetState)              \
  X(cuMemGetAllocationGranularity)           \
  X(cuMemAddressReserve)                     \
  X(cuMemAddressFree)                        \
  X(cuMemAllocHost_v2)                       \
  X(cuMemFreeHost)                           \
  X(cuMemcpyHtoD_v2)                         \
  X(cuMemcpyDtoH_v2)                         \
  X(cuMemcpyDtoD_v2)
// clang-format on

}  // namespace stasis::preload
