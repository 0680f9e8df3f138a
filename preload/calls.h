// The one list of the driver's calls that the agent stands in front of, under the names that
// libcuda.so.1 exports. Whatever is not in it passes untouched.
//
// GATED(name, arguments...): a call that launches, copies or touches device memory, waits for the
// device, or that may not be made while the process is checkpointed (docs/adr/0007); or that takes
// addresses of device memory, which the driver looks up then, and where there is nothing while the
// memory is away (a node of a graph, a texture). It passes the gate and is otherwise the driver's.
// The arguments are given by how they are passed: P pointer or handle, W 64 bits, U 32 bits, H 16
// bits, B 8 bits. GATED_PTSZ and GATED_PTDS: the same, and its variant for per-thread default
// streams, in the driver's two spellings.
//
// HOOK(name): the agent has an answer of its own, `hooks::name` in hooks.h.
//
// Not in it are the calls of CUDA 3.1 and older that take 32-bit addresses: no allocation of the
// agent's can be named by them.
#pragma once

// clang-format off
#define STASIS_GATED_CALLS(GATED, GATED_PTSZ, GATED_PTDS)                          \
  GATED(cuLaunch, P)                                                               \
  GATED(cuLaunchGrid, P, U, U)                                                     \
  GATED(cuLaunchGridAsync, P, U, U, P)                                             \
  GATED_PTSZ(cuLaunchKernel, P, U, U, U, U, U, U, U, P, P, P)                      \
  GATED_PTSZ(cuLaunchKernelEx, P, P, P, P)                                         \
  GATED_PTSZ(cuLaunchCooperativeKernel, P, U, U, U, U, U, U, U, P, P)              \
  GATED(cuLaunchCooperativeKernelMultiDevice, P, U, U)                             \
  GATED_PTSZ(cuLaunchHostFunc, P, P, P)                                            \
  GATED_PTSZ(cuLaunchHostFunc_v2, P, P, P, U)                                      \
  GATED_PTSZ(cuStreamAddCallback, P, P, P, U)                                      \
  GATED_PTSZ(cuGraphLaunch, P, P)                                                  \
  GATED_PTSZ(cuGraphUpload, P, P)                                                  \
                                                                                   \
  GATED(cuGraphAddMemcpyNode, P, P, P, W, P, P)                                    \
  GATED(cuGraphAddMemsetNode, P, P, P, W, P, P)                                    \
  GATED(cuGraphAddBatchMemOpNode, P, P, P, W, P)                                   \
  GATED(cuGraphAddNode, P, P, P, W, P)                                             \
  GATED(cuGraphAddNode_v2, P, P, P, P, W, P)                                       \
  GATED(cuGraphMemcpyNodeSetParams, P, P)                                          \
  GATED(cuGraphMemsetNodeSetParams, P, P)                                          \
  GATED(cuGraphBatchMemOpNodeSetParams, P, P)                                      \
  GATED(cuGraphNodeSetParams, P, P)                                                \
  GATED(cuGraphInstantiate, P, P, P, P, W)                                         \
  GATED(cuGraphInstantiate_v2, P, P, P, P, W)                                      \
  GATED(cuGraphInstantiateWithFlags, P, P, W)                                      \
  GATED_PTSZ(cuGraphInstantiateWithParams, P, P, P)                                \
  GATED(cuGraphExecUpdate, P, P, P, P)                                             \
  GATED(cuGraphExecUpdate_v2, P, P, P)                                             \
  GATED(cuGraphExecMemcpyNodeSetParams, P, P, P, P)                                \
  GATED(cuGraphExecMemsetNodeSetParams, P, P, P, P)                                \
  GATED(cuGraphExecBatchMemOpNodeSetParams, P, P, P)                               \
  GATED(cuGraphExecChildGraphNodeSetParams, P, P, P)                               \
  GATED(cuGraphExecNodeSetParams, P, P, P)                                         \
  GATED(cuTexObjectCreate, P, P, P, P)                                             \
  GATED(cuTexRefSetAddress_v2, P, P, W, W)                                         \
  GATED(cuTexRefSetAddress2D_v2, P, P, W, W)                                       \
  GATED(cuTexRefSetAddress2D_v3, P, P, W, W)                                       \
                                                                                   \
  GATED_PTDS(cuMemcpy, W, W, W)                                                    \
  GATED_PTDS(cuMemcpyPeer, W, P, W, P, W)                                          \
  GATED_PTDS(cuMemcpyHtoD_v2, W, P, W)                                             \
  GATED_PTDS(cuMemcpyDtoH_v2, P, W, W)                                             \
  GATED_PTDS(cuMemcpyDtoD_v2, W, W, W)                                             \
  GATED_PTDS(cuMemcpyDtoA_v2, P, W, W, W)                                          \
  GATED_PTDS(cuMemcpyAtoD_v2, W, P, W, W)                                          \
  GATED_PTDS(cuMemcpyHtoA_v2, P, W, P, W)                                          \
  GATED_PTDS(cuMemcpyAtoH_v2, P, P, W, W)                                          \
  GATED_PTDS(cuMemcpyAtoA_v2, P, W, P, W, W)                                       \
  GATED_PTDS(cuMemcpy2D_v2, P)                                                     \
  GATED_PTDS(cuMemcpy2DUnaligned_v2, P)                                            \
  GATED_PTDS(cuMemcpy3D_v2, P)                                                     \
  GATED_PTDS(cuMemcpy3DPeer, P)                                                    \
  GATED_PTSZ(cuMemcpyAsync, W, W, W, P)                                            \
  GATED_PTSZ(cuMemcpyPeerAsync, W, P, W, P, W, P)                                  \
  GATED_PTSZ(cuMemcpyHtoDAsync_v2, W, P, W, P)                                     \
  GATED_PTSZ(cuMemcpyDtoHAsync_v2, P, W, W, P)                                     \
  GATED_PTSZ(cuMemcpyDtoDAsync_v2, W, W, W, P)                                     \
  GATED_PTSZ(cuMemcpyHtoAAsync_v2, P, W, P, W, P)                                  \
  GATED_PTSZ(cuMemcpyAtoHAsync_v2, P, P, W, W, P)                                  \
  GATED_PTSZ(cuMemcpy2DAsync_v2, P, P)                                             \
  GATED_PTSZ(cuMemcpy3DAsync_v2, P, P)                                             \
  GATED_PTSZ(cuMemcpy3DPeerAsync, P, P)                                            \
  GATED_PTSZ(cuMemcpyBatchAsync, P, P, P, W, P, P, W, P, P)                        \
  GATED_PTSZ(cuMemcpyBatchAsync_v2, P, P, P, W, P, P, W, P)                        \
  GATED_PTSZ(cuMemcpy3DBatchAsync, W, P, P, W, P)                                  \
  GATED_PTSZ(cuMemcpy3DBatchAsync_v2, W, P, W, P)                                  \
  GATED_PTSZ(cuMemcpyWithAttributesAsync, W, W, W, P, P)                           \
  GATED_PTSZ(cuMemcpy3DWithAttributesAsync, P, W, P)                               \
                                                                                   \
  GATED_PTDS(cuMemsetD8_v2, W, B, W)                                               \
  GATED_PTDS(cuMemsetD16_v2, W, H, W)                                              \
  GATED_PTDS(cuMemsetD32_v2, W, U, W)                                              \
  GATED_PTDS(cuMemsetD2D8_v2, W, W, B, W, W)                                       \
  GATED_PTDS(cuMemsetD2D16_v2, W, W, H, W, W)                                      \
  GATED_PTDS(cuMemsetD2D32_v2, W, W, U, W, W)                                      \
  GATED_PTSZ(cuMemsetD8Async, W, B, W, P)                                          \
  GATED_PTSZ(cuMemsetD16Async, W, H, W, P)                                         \
  GATED_PTSZ(cuMemsetD32Async, W, U, W, P)                                         \
  GATED_PTSZ(cuMemsetD2D8Async, W, W, B, W, W, P)                                  \
  GATED_PTSZ(cuMemsetD2D16Async, W, W, H, W, W, P)                                 \
  GATED_PTSZ(cuMemsetD2D32Async, W, W, U, W, W, P)                                 \
                                                                                   \
  GATED_PTSZ(cuMemPrefetchBatchAsync, P, P, W, P, P, W, W, P)                      \
  GATED_PTSZ(cuMemDiscardBatchAsync, P, P, W, W, P)                                \
  GATED_PTSZ(cuMemDiscardAndPrefetchBatchAsync, P, P, W, P, P, W, W, P)            \
  GATED_PTSZ(cuMemBatchDecompressAsync, P, W, U, P, P)                             \
  GATED(cuMemRangeGetAttribute, P, W, U, W, W)                                     \
  GATED(cuMemRangeGetAttributes, P, P, P, W, W, W)                                 \
  GATED(cuMemGetInfo_v2, P, P)                                                     \
                                                                                   \
  GATED_PTSZ(cuStreamQuery, P)                                                     \
  GATED_PTSZ(cuStreamWaitEvent, P, P, U)                                           \
  GATED_PTSZ(cuStreamWaitValue32, P, W, U, U)                                      \
  GATED_PTSZ(cuStreamWaitValue32_v2, P, W, U, U)                                   \
  GATED_PTSZ(cuStreamWaitValue64, P, W, W, U)                                      \
  GATED_PTSZ(cuStreamWaitValue64_v2, P, W, W, U)                                   \
  GATED_PTSZ(cuStreamWriteValue32, P, W, U, U)                                     \
  GATED_PTSZ(cuStreamWriteValue32_v2, P, W, U, U)                                  \
  GATED_PTSZ(cuStreamWriteValue64, P, W, W, U)                                     \
  GATED_PTSZ(cuStreamWriteValue64_v2, P, W, W, U)                                  \
  GATED_PTSZ(cuStreamBatchMemOp, P, U, P, U)                                       \
  GATED_PTSZ(cuStreamBatchMemOp_v2, P, U, P, U)                                    \
  GATED_PTSZ(cuSignalExternalSemaphoresAsync, P, P, U, P)                          \
  GATED_PTSZ(cuWaitExternalSemaphoresAsync, P, P, U, P)                            \
  GATED_PTSZ(cuGraphicsMapResources, U, P, P)                                      \
  GATED_PTSZ(cuGraphicsUnmapResources, U, P, P)                                    \
  GATED(cuEventQuery, P)                                                           \
  GATED(cuEventElapsedTime, P, P, P)                                               \
  GATED(cuEventElapsedTime_v2, P, P, P)                                            \
  GATED_PTSZ(cuEventRecord, P, P)                                                  \
  GATED_PTSZ(cuEventRecordWithFlags, P, P, U)                                      \
  GATED(cuCtxRecordEvent, P, P)                                                    \
  GATED(cuCtxWaitEvent, P, P)                                                      \
  GATED(cuGreenCtxRecordEvent, P, P)                                               \
  GATED(cuGreenCtxWaitEvent, P, P)                                                 \
  GATED(cuCtxGetLimit, P, U)                                                       \
  GATED(cuCtxSetLimit, U, W)

#define STASIS_HOOKED_CALLS(HOOK)         \
  HOOK(cuGetProcAddress)                  \
  HOOK(cuGetProcAddress_v2)               \
  HOOK(cuMemAlloc_v2)                     \
  HOOK(cuMemAllocPitch_v2)                \
  HOOK(cuMemFree_v2)                      \
  HOOK(cuMemFreeAsync)                    \
  HOOK(cuMemFreeAsync_ptsz)               \
  HOOK(cuMemAllocAsync)                   \
  HOOK(cuMemAllocAsync_ptsz)              \
  HOOK(cuMemAllocFromPoolAsync)           \
  HOOK(cuMemAllocFromPoolAsync_ptsz)      \
  HOOK(cuMemPoolCreate)                   \
  HOOK(cuMemPoolDestroy)                  \
  HOOK(cuMemPoolTrimTo)                   \
  HOOK(cuMemPoolSetAttribute)             \
  HOOK(cuMemPoolGetAttribute)             \
  HOOK(cuMemPoolSetAccess)                \
  HOOK(cuMemPoolImportFromShareableHandle)\
  HOOK(cuMemPoolImportPointer)            \
  HOOK(cuMemGetAccess)                    \
  HOOK(cuStreamSynchronize)               \
  HOOK(cuStreamSynchronize_ptsz)          \
  HOOK(cuEventSynchronize)                \
  HOOK(cuCtxSynchronize)                  \
  HOOK(cuCtxSynchronize_v2)               \
  HOOK(cuMemAllocManaged)                 \
  HOOK(cuMemAdvise)                       \
  HOOK(cuMemAdvise_v2)                    \
  HOOK(cuMemPrefetchAsync)                \
  HOOK(cuMemPrefetchAsync_ptsz)           \
  HOOK(cuMemPrefetchAsync_v2)             \
  HOOK(cuMemPrefetchAsync_v2_ptsz)        \
  HOOK(cuStreamAttachMemAsync)            \
  HOOK(cuStreamAttachMemAsync_ptsz)       \
  HOOK(cuMemGetAddressRange_v2)           \
  HOOK(cuPointerGetAttribute)             \
  HOOK(cuPointerGetAttributes)            \
  HOOK(cuPointerSetAttribute)             \
  HOOK(cuIpcGetMemHandle)                 \
  HOOK(cuIpcOpenMemHandle)                \
  HOOK(cuIpcOpenMemHandle_v2)             \
  HOOK(cuIpcCloseMemHandle)               \
  HOOK(cuMemCreate)                       \
  HOOK(cuMemRelease)                      \
  HOOK(cuMemMap)                          \
  HOOK(cuMemUnmap)                        \
  HOOK(cuMemSetAccess)                    \
  HOOK(cuMemRetainAllocationHandle)       \
  HOOK(cuMemExportToShareableHandle)      \
  HOOK(cuMemImportFromShareableHandle)    \
  HOOK(cuMemGetAllocationPropertiesFromHandle)\
  HOOK(cuMemGetHandleForAddressRange)     \
  HOOK(cuMulticastCreate)                 \
  HOOK(cuMulticastAddDevice)              \
  HOOK(cuMulticastUnbind)                 \
  HOOK(cuMulticastBindMem)                \
  HOOK(cuMulticastBindMem_v2)             \
  HOOK(cuMulticastBindAddr)               \
  HOOK(cuMulticastBindAddr_v2)            \
  HOOK(cuMemMapArrayAsync)                \
  HOOK(cuMemMapArrayAsync_ptsz)           \
  HOOK(cuDevicePrimaryCtxRetain)          \
  HOOK(cuDevicePrimaryCtxRelease)         \
  HOOK(cuDevicePrimaryCtxRelease_v2)      \
  HOOK(cuDevicePrimaryCtxReset)           \
  HOOK(cuDevicePrimaryCtxReset_v2)        \
  HOOK(cuCtxCreate)                       \
  HOOK(cuCtxCreate_v2)                    \
  HOOK(cuCtxCreate_v3)                    \
  HOOK(cuCtxCreate_v4)                    \
  HOOK(cuCtxDestroy)                      \
  HOOK(cuCtxDestroy_v2)                   \
  HOOK(cuCtxAttach)                       \
  HOOK(cuCtxDetach)                       \
  HOOK(cuGreenCtxCreate)                  \
  HOOK(cuGreenCtxDestroy)                 \
  HOOK(cuCtxEnablePeerAccess)             \
  HOOK(cuCtxDisablePeerAccess)            \
  HOOK(cuStreamBeginCapture)              \
  HOOK(cuStreamBeginCapture_ptsz)         \
  HOOK(cuStreamBeginCapture_v2)           \
  HOOK(cuStreamBeginCapture_v2_ptsz)      \
  HOOK(cuStreamBeginCaptureToGraph)       \
  HOOK(cuStreamBeginCaptureToGraph_ptsz)  \
  HOOK(cuStreamBeginRecaptureToGraph)     \
  HOOK(cuStreamBeginRecaptureToGraph_ptsz)\
  HOOK(cuStreamEndCapture)                \
  HOOK(cuStreamEndCapture_ptsz)           \
  HOOK(cuStreamDestroy)                   \
  HOOK(cuStreamDestroy_v2)
// clang-format on
