// The part of the CUDA driver's binary interface that Stasis uses, in our own words, so that
// nothing here needs CUDA's headers to be built.
//
// What is here: types, constants and function types of libcuda.so.1, plus the few of
// libnvidia-ml.so.1 (NVML) that say which processes use a GPU. Names are CUDA's own, because they
// are the field's standard; all of them live in namespace stasis::cuda, so that this header and the
// real cuda.h can be included together (sim/abi_check.cc does so and compares them).
//
// Functions are declared as types, never as symbols: a client loads the library at run time and
// asks
//   auto* init = reinterpret_cast<stasis::cuda::fn::cuInit*>(dlsym(handle, "cuInit"));
// A name that ends in _v2 and the like is the symbol that the library really exports.
//
// Ownership and threads: plain data, nothing to own; the driver's functions may be called from any
// thread.
// Long because it is a list, with one entry for each type, constant and function of the driver that
// is used.
#pragma once

#include <cstddef>
#include <cstdint>

// Constants that cuda.h defines as macros have names of our own (kMemHostAllocPortable).
namespace stasis::cuda {

// --- Result codes. The underlying type is fixed, so a code that this list lacks is still a value.
enum CUresult : unsigned int {
#define STASIS_CUDA_RESULT(name, number) name = (number),
#include "abi/cuda_results.inc"
#undef STASIS_CUDA_RESULT
};

// --- Handles and small values
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmemoryPool = struct CUmemPoolHandle_st*;
using CUarray = struct CUarray_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;
using CUmemGenericAllocationHandle = unsigned long long;
using CUhostFn = void (*)(void* user_data);
using CUstreamCallback = void (*)(CUstream stream, CUresult status, void* user_data);

enum CUstreamCaptureMode : unsigned {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};
enum CUstreamCaptureStatus : unsigned {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
};

struct CUuuid {
  char bytes[16];
};

// The two stream handles that stand for a default stream.
inline const CUstream kStreamLegacy = reinterpret_cast<CUstream>(std::uintptr_t{1});
inline const CUstream kStreamPerThread = reinterpret_cast<CUstream>(std::uintptr_t{2});

enum CUdevice_attribute : unsigned int {
  CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
  CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X = 2,
  CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y = 3,
  CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z = 4,
  CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X = 5,
  CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y = 6,
  CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z = 7,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8,
  CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY = 9,
  CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
  CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11,
  CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK = 12,
  CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
  CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT = 14,
  CU_DEVICE_ATTRIBUTE_GPU_OVERLAP = 15,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT = 17,
  CU_DEVICE_ATTRIBUTE_INTEGRATED = 18,
  CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
  CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
  CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS = 31,
  CU_DEVICE_ATTRIBUTE_ECC_ENABLED = 32,
  CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
  CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
  CU_DEVICE_ATTRIBUTE_TCC_DRIVER = 35,
  CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
  CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
  CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
  CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
  CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
  CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
  CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED = 90,
  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
  CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
  CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113,
  CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
  CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,
  CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132,
};

enum CUctx_flags : unsigned int {
  CU_CTX_SCHED_AUTO = 0x00,
  CU_CTX_SCHED_SPIN = 0x01,
  CU_CTX_SCHED_YIELD = 0x02,
  CU_CTX_SCHED_BLOCKING_SYNC = 0x04,
  CU_CTX_MAP_HOST = 0x08,
  CU_CTX_SYNC_MEMOPS = 0x80,
  CU_CTX_FLAGS_MASK = 0xFF,
};

enum CUlimit : unsigned int {
  CU_LIMIT_STACK_SIZE = 0x00,
  CU_LIMIT_PRINTF_FIFO_SIZE = 0x01,
  CU_LIMIT_MALLOC_HEAP_SIZE = 0x02,
};

enum CUstream_flags : unsigned int { CU_STREAM_DEFAULT = 0x0, CU_STREAM_NON_BLOCKING = 0x1 };

enum CUevent_flags : unsigned int {
  CU_EVENT_DEFAULT = 0x0,
  CU_EVENT_BLOCKING_SYNC = 0x1,
  CU_EVENT_DISABLE_TIMING = 0x2,
  CU_EVENT_INTERPROCESS = 0x4,
};

enum CUmemorytype : unsigned int {
  CU_MEMORYTYPE_HOST = 0x01,
  CU_MEMORYTYPE_DEVICE = 0x02,
  CU_MEMORYTYPE_ARRAY = 0x03,
  CU_MEMORYTYPE_UNIFIED = 0x04,
};

enum CUmemAttach_flags : unsigned int {
  CU_MEM_ATTACH_GLOBAL = 0x1,
  CU_MEM_ATTACH_HOST = 0x2,
  CU_MEM_ATTACH_SINGLE = 0x4,
};

// Where managed memory is wanted, other than on a GPU; and no place in particular.
inline constexpr CUdevice kDeviceCpu = -1;
inline constexpr CUdevice kDeviceInvalid = -2;

enum CUmem_advise : unsigned int {
  CU_MEM_ADVISE_SET_READ_MOSTLY = 1,
  CU_MEM_ADVISE_UNSET_READ_MOSTLY = 2,
  CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
  CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION = 4,
  CU_MEM_ADVISE_SET_ACCESSED_BY = 5,
  CU_MEM_ADVISE_UNSET_ACCESSED_BY = 6,
};

enum CUmem_range_attribute : unsigned int {
  CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY = 1,
  CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
  CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
  CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
};

inline constexpr unsigned int kMemHostAllocPortable = 0x01;
inline constexpr unsigned int kMemHostAllocDeviceMap = 0x02;
inline constexpr unsigned int kMemHostAllocWriteCombined = 0x04;
inline constexpr unsigned int kMemHostRegisterPortable = 0x01;
inline constexpr unsigned int kMemHostRegisterDeviceMap = 0x02;
inline constexpr unsigned int kMemHostRegisterIoMemory = 0x04;
inline constexpr unsigned int kMemHostRegisterReadOnly = 0x08;

enum CUpointer_attribute : unsigned int {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
  CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
  CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
  CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
  CU_POINTER_ATTRIBUTE_MAPPED = 13,
  CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
  CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
  CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17,
  CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
  CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE = 21,  // since CUDA 12.8
};

enum CUfunction_attribute : unsigned int {
  CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
  CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
  CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2,
  CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
  CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
  CU_FUNC_ATTRIBUTE_PTX_VERSION = 5,
  CU_FUNC_ATTRIBUTE_BINARY_VERSION = 6,
  CU_FUNC_ATTRIBUTE_CACHE_MODE_CA = 7,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
};

enum CUjit_option : unsigned int { CU_JIT_MAX_REGISTERS = 0 };

inline constexpr std::size_t kIpcHandleSize = 64;
inline constexpr unsigned int kIpcMemLazyEnablePeerAccess = 0x1;

struct CUipcMemHandle {
  char reserved[kIpcHandleSize];
};

// Marks in the `extra` list of cuLaunchKernel, whose values are pointers.
inline void* const kLaunchParamEnd = nullptr;
inline void* const kLaunchParamBufferPointer = reinterpret_cast<void*>(std::uintptr_t{1});
inline void* const kLaunchParamBufferSize = reinterpret_cast<void*>(std::uintptr_t{2});

struct CUlaunchAttribute {
  unsigned int id;
  char pad[4];
  alignas(8) char value[64];
};

struct CUlaunchConfig {
  unsigned int gridDimX;
  unsigned int gridDimY;
  unsigned int gridDimZ;
  unsigned int blockDimX;
  unsigned int blockDimY;
  unsigned int blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned int numAttrs;
};

struct CUctxCreateParams {
  void* execAffinityParams;
  int numExecAffinityParams;
  void* cigParams;
};

struct CUDA_MEMCPY2D {
  std::size_t srcXInBytes;
  std::size_t srcY;
  CUmemorytype srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  CUarray srcArray;
  std::size_t srcPitch;
  std::size_t dstXInBytes;
  std::size_t dstY;
  CUmemorytype dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  CUarray dstArray;
  std::size_t dstPitch;
  std::size_t WidthInBytes;  // NOLINT(readability-identifier-naming): cuda.h's name
  std::size_t Height;        // NOLINT(readability-identifier-naming): likewise
};

// --- Virtual memory management and pools
enum CUmemLocationType : unsigned int {
  CU_MEM_LOCATION_TYPE_INVALID = 0x0,
  CU_MEM_LOCATION_TYPE_DEVICE = 0x1,
  CU_MEM_LOCATION_TYPE_HOST = 0x2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 0x3,
  CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 0x4,
};

enum CUmemAllocationType : unsigned int {
  CU_MEM_ALLOCATION_TYPE_INVALID = 0x0,
  CU_MEM_ALLOCATION_TYPE_PINNED = 0x1,
};

enum CUmemAllocationHandleType : unsigned int {
  CU_MEM_HANDLE_TYPE_NONE = 0x0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 0x1,
  CU_MEM_HANDLE_TYPE_FABRIC = 0x8,
};

enum CUmemAccess_flags : unsigned int {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0x0,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 0x1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 0x3,
};

enum CUmemAllocationGranularity_flags : unsigned int {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0x0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 0x1,
};

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};

inline constexpr unsigned short kMemCreateUsageHwDecompress = 0x2;  // since CUDA 12.8

struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUmulticastObjectProp {
  unsigned numDevices;
  std::size_t size;
  unsigned long long handleTypes;
  unsigned long long flags;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

struct CUmemPoolProps {
  CUmemAllocationType allocType;
  CUmemAllocationHandleType handleTypes;
  CUmemLocation location;
  void* win32SecurityAttributes;
  std::size_t maxSize;
  unsigned short usage;
  unsigned char reserved[54];
};

enum CUmemPool_attribute : unsigned int {
  CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
  CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
  CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
  CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
  CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
  CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH = 6,
  CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
  CU_MEMPOOL_ATTR_USED_MEM_HIGH = 8,
};

// --- Looking symbols up
enum CUdriverProcAddressQueryResult : unsigned int {
  CU_GET_PROC_ADDRESS_SUCCESS = 0,
  CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
  CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
};
inline constexpr std::uint64_t CU_GET_PROC_ADDRESS_DEFAULT = 0;
inline constexpr std::uint64_t CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1;
inline constexpr std::uint64_t CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2;

// --- Checkpoint. Every argument struct has 64 bytes, and what is reserved must be zero.
enum CUprocessState : unsigned int {
  CU_PROCESS_STATE_RUNNING = 0,
  CU_PROCESS_STATE_LOCKED = 1,
  CU_PROCESS_STATE_CHECKPOINTED = 2,
  CU_PROCESS_STATE_FAILED = 3,
};

struct CUcheckpointLockArgs {
  unsigned int timeoutMs;  // 0 waits for ever
  unsigned int reserved0;
  std::uint64_t reserved1[7];
};

struct CUcheckpointCheckpointArgs {
  std::uint64_t reserved[8];
};

struct CUcheckpointGpuPair {
  CUuuid oldUuid;
  CUuuid newUuid;
};

struct CUcheckpointRestoreArgs {
  CUcheckpointGpuPair* gpuPairs;  // since driver 580; older ones have reserved zeros here
  unsigned int gpuPairsCount;
  // NOLINTNEXTLINE(bugprone-sizeof-expression): as in cuda.h, the pointer's size is meant
  char reserved[52 - sizeof(CUcheckpointGpuPair*)];
  std::uint64_t reserved1;
};

struct CUcheckpointUnlockArgs {
  std::uint64_t reserved[8];
};

// --- NVML
// NOLINTBEGIN(readability-identifier-naming): the names are NVML's
enum nvmlReturn_t : unsigned int {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NO_PERMISSION = 4,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_FUNCTION_NOT_FOUND = 13,
  NVML_ERROR_GPU_IS_LOST = 15,
  NVML_ERROR_UNKNOWN = 999,
};

using nvmlDevice_t = struct nvmlDevice_st*;

enum nvmlEnableState_t : unsigned int { NVML_FEATURE_DISABLED = 0, NVML_FEATURE_ENABLED = 1 };

struct nvmlMemory_t {  // bytes
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct nvmlPciInfo_t {  // the layout that nvmlDeviceGetPciInfo_v3 fills
  char busIdLegacy[16];
  unsigned int domain;
  unsigned int bus;
  unsigned int device;
  unsigned int pciDeviceId;
  unsigned int pciSubSystemId;
  char busId[32];
};

struct nvmlProcessInfo_t {  // the layout that the _v2 and _v3 process lists fill
  unsigned int pid;
  unsigned long long usedGpuMemory;  // bytes
  unsigned int gpuInstanceId;
  unsigned int computeInstanceId;
};
// NOLINTEND(readability-identifier-naming)

static_assert(sizeof(CUuuid) == 16);
static_assert(sizeof(CUipcMemHandle) == 64);
static_assert(sizeof(CUlaunchAttribute) == 72);
static_assert(sizeof(CUlaunchConfig) == 56);
static_assert(sizeof(CUDA_MEMCPY2D) == 128);
static_assert(sizeof(CUmemLocation) == 8);
static_assert(sizeof(CUmemAllocationProp) == 32);
static_assert(sizeof(CUmemAccessDesc) == 12);
static_assert(sizeof(CUmemPoolProps) == 88);
static_assert(sizeof(CUcheckpointLockArgs) == 64);
static_assert(sizeof(CUcheckpointCheckpointArgs) == 64);
static_assert(sizeof(CUcheckpointGpuPair) == 32);
static_assert(sizeof(CUcheckpointRestoreArgs) == 64);
static_assert(offsetof(CUcheckpointRestoreArgs, gpuPairsCount) == 8);
static_assert(sizeof(CUcheckpointUnlockArgs) == 64);
static_assert(sizeof(nvmlMemory_t) == 24);
static_assert(sizeof(nvmlPciInfo_t) == 68);
static_assert(sizeof(nvmlProcessInfo_t) == 24);

// --- Function types, named as the symbols are
namespace fn {
using cuInit = CUresult(unsigned int flags);
using cuDriverGetVersion = CUresult(int* version);
using cuGetErrorName = CUresult(CUresult error, const char** name);
using cuGetErrorString = CUresult(CUresult error, const char** text);
// The symbol of this one is plain cuGetProcAddress, a name that cuda.h redefines.
using cuGetProcAddress_v1 = CUresult(const char* symbol, void** function, int cuda_version,
                                     std::uint64_t flags);
using cuGetProcAddress_v2 = CUresult(const char* symbol, void** function, int cuda_version,
                                     std::uint64_t flags, CUdriverProcAddressQueryResult* status);

using cuDeviceGet = CUresult(CUdevice* device, int ordinal);
using cuDeviceGetCount = CUresult(int* count);
using cuDeviceGetName = CUresult(char* name, int length, CUdevice device);
using cuDeviceGetUuid = CUresult(CUuuid* uuid, CUdevice device);
using cuDeviceGetUuid_v2 = CUresult(CUuuid* uuid, CUdevice device);
using cuDeviceTotalMem_v2 = CUresult(std::size_t* bytes, CUdevice device);
using cuDeviceGetPCIBusId = CUresult(char* bus_id, int length, CUdevice device);
using cuDeviceGetByPCIBusId = CUresult(CUdevice* device, const char* bus_id);
using cuDeviceGetAttribute = CUresult(int* value, CUdevice_attribute attribute, CUdevice device);
using cuDeviceComputeCapability = CUresult(int* major, int* minor, CUdevice device);
using cuDeviceCanAccessPeer = CUresult(int* can, CUdevice device, CUdevice peer);
using cuDevicePrimaryCtxRetain = CUresult(CUcontext* context, CUdevice device);
using cuDevicePrimaryCtxRelease_v2 = CUresult(CUdevice device);
using cuDevicePrimaryCtxReset_v2 = CUresult(CUdevice device);
using cuDevicePrimaryCtxGetState = CUresult(CUdevice device, unsigned int* flags, int* active);
using cuDevicePrimaryCtxSetFlags_v2 = CUresult(CUdevice device, unsigned int flags);

using cuCtxCreate_v2 = CUresult(CUcontext* context, unsigned int flags, CUdevice device);
using cuCtxCreate_v4 = CUresult(CUcontext* context, CUctxCreateParams* params, unsigned int flags,
                                CUdevice device);
using cuCtxDestroy_v2 = CUresult(CUcontext context);
using cuCtxPushCurrent_v2 = CUresult(CUcontext context);
using cuCtxPopCurrent_v2 = CUresult(CUcontext* context);
using cuCtxSetCurrent = CUresult(CUcontext context);
using cuCtxGetCurrent = CUresult(CUcontext* context);
using cuCtxGetDevice = CUresult(CUdevice* device);
using cuCtxGetFlags = CUresult(unsigned int* flags);
using cuCtxSetFlags = CUresult(unsigned int flags);
using cuCtxGetApiVersion = CUresult(CUcontext context, unsigned int* version);
using cuCtxGetStreamPriorityRange = CUresult(int* least, int* greatest);
using cuCtxGetLimit = CUresult(std::size_t* value, CUlimit limit);
using cuCtxSetLimit = CUresult(CUlimit limit, std::size_t value);
using cuCtxSynchronize = CUresult();
using cuCtxEnablePeerAccess = CUresult(CUcontext peer, unsigned int flags);
using cuCtxDisablePeerAccess = CUresult(CUcontext peer);

using cuMemGetInfo_v2 = CUresult(std::size_t* free, std::size_t* total);
using cuMemAlloc_v2 = CUresult(CUdeviceptr* pointer, std::size_t bytes);
using cuMemAllocPitch_v2 = CUresult(CUdeviceptr* pointer, std::size_t* pitch, std::size_t width,
                                    std::size_t height, unsigned int element_size);
using cuMemFree_v2 = CUresult(CUdeviceptr pointer);
using cuMemGetAddressRange_v2 = CUresult(CUdeviceptr* base, std::size_t* size, CUdeviceptr pointer);
using cuMemAllocHost_v2 = CUresult(void** pointer, std::size_t bytes);
using cuMemFreeHost = CUresult(void* pointer);
using cuMemHostAlloc = CUresult(void** pointer, std::size_t bytes, unsigned int flags);
using cuMemHostRegister_v2 = CUresult(void* pointer, std::size_t bytes, unsigned int flags);
using cuMemHostUnregister = CUresult(void* pointer);
using cuMemHostGetDevicePointer_v2 = CUresult(CUdeviceptr* device, void* host, unsigned int flags);
using cuMemHostGetFlags = CUresult(unsigned int* flags, void* pointer);
using cuMemAllocManaged = CUresult(CUdeviceptr* pointer, std::size_t bytes, unsigned int flags);
using cuMemAdvise = CUresult(CUdeviceptr pointer, std::size_t bytes, CUmem_advise advice,
                             CUdevice device);
using cuMemRangeGetAttribute = CUresult(void* data, std::size_t data_bytes,
                                        CUmem_range_attribute attribute, CUdeviceptr pointer,
                                        std::size_t bytes);
using cuMemPrefetchAsync = CUresult(CUdeviceptr pointer, std::size_t bytes, CUdevice device,
                                    CUstream stream);
using cuStreamAttachMemAsync = CUresult(CUstream stream, CUdeviceptr pointer, std::size_t bytes,
                                        unsigned int flags);
using cuMemAllocAsync = CUresult(CUdeviceptr* pointer, std::size_t bytes, CUstream stream);
using cuMemAllocFromPoolAsync = CUresult(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool,
                                         CUstream stream);
using cuMemFreeAsync = CUresult(CUdeviceptr pointer, CUstream stream);
using cuDeviceGetDefaultMemPool = CUresult(CUmemoryPool* pool, CUdevice device);
using cuDeviceGetMemPool = CUresult(CUmemoryPool* pool, CUdevice device);
using cuDeviceSetMemPool = CUresult(CUdevice device, CUmemoryPool pool);
using cuMemPoolCreate = CUresult(CUmemoryPool* pool, const CUmemPoolProps* props);
using cuMemPoolDestroy = CUresult(CUmemoryPool pool);
using cuMemPoolTrimTo = CUresult(CUmemoryPool pool, std::size_t bytes_to_keep);
using cuMemPoolSetAttribute = CUresult(CUmemoryPool pool, CUmemPool_attribute attribute,
                                       void* value);
using cuMemPoolGetAttribute = CUresult(CUmemoryPool pool, CUmemPool_attribute attribute,
                                       void* value);
using cuMemPoolSetAccess = CUresult(CUmemoryPool pool, const CUmemAccessDesc* map,
                                    std::size_t count);
using cuMemPoolGetAccess = CUresult(CUmemAccess_flags* flags, CUmemoryPool pool,
                                    CUmemLocation* location);
using cuIpcGetMemHandle = CUresult(CUipcMemHandle* handle, CUdeviceptr pointer);
using cuIpcOpenMemHandle_v2 = CUresult(CUdeviceptr* pointer, CUipcMemHandle handle,
                                       unsigned int flags);
using cuIpcCloseMemHandle = CUresult(CUdeviceptr pointer);
using cuPointerGetAttribute = CUresult(void* data, CUpointer_attribute attribute,
                                       CUdeviceptr pointer);
using cuPointerGetAttributes = CUresult(unsigned int count, CUpointer_attribute* attributes,
                                        void** data, CUdeviceptr pointer);
using cuPointerSetAttribute = CUresult(const void* value, CUpointer_attribute attribute,
                                       CUdeviceptr pointer);

using cuMemcpy = CUresult(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes);
using cuMemcpyAsync = CUresult(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,
                               CUstream stream);
using cuMemcpyHtoD_v2 = CUresult(CUdeviceptr dst, const void* src, std::size_t bytes);
using cuMemcpyHtoDAsync_v2 = CUresult(CUdeviceptr dst, const void* src, std::size_t bytes,
                                      CUstream stream);
using cuMemcpyDtoH_v2 = CUresult(void* dst, CUdeviceptr src, std::size_t bytes);
using cuMemcpyDtoHAsync_v2 = CUresult(void* dst, CUdeviceptr src, std::size_t bytes,
                                      CUstream stream);
using cuMemcpyDtoD_v2 = CUresult(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes);
using cuMemcpyDtoDAsync_v2 = CUresult(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,
                                      CUstream stream);
using cuMemcpy2D_v2 = CUresult(const CUDA_MEMCPY2D* copy);
using cuMemcpy2DUnaligned_v2 = CUresult(const CUDA_MEMCPY2D* copy);
using cuMemcpy2DAsync_v2 = CUresult(const CUDA_MEMCPY2D* copy, CUstream stream);
using cuMemcpyPeer = CUresult(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                              CUcontext src_context, std::size_t bytes);
using cuMemcpyPeerAsync = CUresult(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                                   CUcontext src_context, std::size_t bytes, CUstream stream);
using cuMemsetD8_v2 = CUresult(CUdeviceptr dst, unsigned char value, std::size_t count);
using cuMemsetD16_v2 = CUresult(CUdeviceptr dst, unsigned short value, std::size_t count);
using cuMemsetD32_v2 = CUresult(CUdeviceptr dst, unsigned int value, std::size_t count);
using cuMemsetD8Async = CUresult(CUdeviceptr dst, unsigned char value, std::size_t count,
                                 CUstream stream);
using cuMemsetD16Async = CUresult(CUdeviceptr dst, unsigned short value, std::size_t count,
                                  CUstream stream);
using cuMemsetD32Async = CUresult(CUdeviceptr dst, unsigned int value, std::size_t count,
                                  CUstream stream);

using cuStreamCreate = CUresult(CUstream* stream, unsigned int flags);
using cuStreamCreateWithPriority = CUresult(CUstream* stream, unsigned int flags, int priority);
using cuStreamDestroy_v2 = CUresult(CUstream stream);
using cuStreamQuery = CUresult(CUstream stream);
using cuStreamSynchronize = CUresult(CUstream stream);
using cuStreamWaitEvent = CUresult(CUstream stream, CUevent event, unsigned int flags);
using cuStreamGetFlags = CUresult(CUstream stream, unsigned int* flags);
using cuStreamGetPriority = CUresult(CUstream stream, int* priority);
using cuStreamGetId = CUresult(CUstream stream, unsigned long long* id);
using cuStreamGetCtx = CUresult(CUstream stream, CUcontext* context);
using cuStreamBeginCapture_v2 = CUresult(CUstream stream, CUstreamCaptureMode mode);
using cuStreamEndCapture = CUresult(CUstream stream, CUgraph* graph);
using cuStreamIsCapturing = CUresult(CUstream stream, CUstreamCaptureStatus* status);
using cuGraphInstantiateWithFlags = CUresult(CUgraphExec* executable, CUgraph graph,
                                             unsigned long long flags);
using cuGraphLaunch = CUresult(CUgraphExec executable, CUstream stream);
using cuGraphExecDestroy = CUresult(CUgraphExec executable);
using cuGraphDestroy = CUresult(CUgraph graph);
using cuStreamAddCallback = CUresult(CUstream stream, CUstreamCallback callback, void* user_data,
                                     unsigned int flags);
using cuLaunchHostFunc = CUresult(CUstream stream, CUhostFn function, void* user_data);
using cuEventCreate = CUresult(CUevent* event, unsigned int flags);
using cuEventDestroy_v2 = CUresult(CUevent event);
using cuEventRecord = CUresult(CUevent event, CUstream stream);
using cuEventRecordWithFlags = CUresult(CUevent event, CUstream stream, unsigned int flags);
using cuEventQuery = CUresult(CUevent event);
using cuEventSynchronize = CUresult(CUevent event);
using cuEventElapsedTime = CUresult(float* milliseconds, CUevent start, CUevent end);
using cuEventElapsedTime_v2 = CUresult(float* milliseconds, CUevent start, CUevent end);

using cuModuleLoadData = CUresult(CUmodule* module, const void* image);
using cuModuleLoadDataEx = CUresult(CUmodule* module, const void* image, unsigned int option_count,
                                    CUjit_option* options, void** option_values);
using cuModuleUnload = CUresult(CUmodule module);
using cuModuleGetFunction = CUresult(CUfunction* function, CUmodule module, const char* name);
using cuModuleGetGlobal_v2 = CUresult(CUdeviceptr* pointer, std::size_t* bytes, CUmodule module,
                                      const char* name);
using cuFuncGetAttribute = CUresult(int* value, CUfunction_attribute attribute,
                                    CUfunction function);
using cuFuncSetAttribute = CUresult(CUfunction function, CUfunction_attribute attribute, int value);
using cuLaunchKernel = CUresult(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                void** params, void** extra);
using cuLaunchKernelEx = CUresult(const CUlaunchConfig* config, CUfunction function, void** params,
                                  void** extra);

using cuMemAddressReserve = CUresult(CUdeviceptr* pointer, std::size_t size, std::size_t alignment,
                                     CUdeviceptr hint, unsigned long long flags);
using cuMemAddressFree = CUresult(CUdeviceptr pointer, std::size_t size);
using cuMemCreate = CUresult(CUmemGenericAllocationHandle* handle, std::size_t size,
                             const CUmemAllocationProp* prop, unsigned long long flags);
using cuMemRelease = CUresult(CUmemGenericAllocationHandle handle);
using cuMemMap = CUresult(CUdeviceptr pointer, std::size_t size, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags);
using cuMemUnmap = CUresult(CUdeviceptr pointer, std::size_t size);
using cuMemSetAccess = CUresult(CUdeviceptr pointer, std::size_t size, const CUmemAccessDesc* desc,
                                std::size_t count);
using cuMemGetAccess = CUresult(unsigned long long* flags, const CUmemLocation* location,
                                CUdeviceptr pointer);
using cuMemGetAllocationGranularity = CUresult(std::size_t* granularity,
                                               const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags option);
using cuMemExportToShareableHandle = CUresult(void* shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type,
                                              unsigned long long flags);
using cuMulticastCreate = CUresult(CUmemGenericAllocationHandle* multicast,
                                   const CUmulticastObjectProp* prop);
using cuMulticastAddDevice = CUresult(CUmemGenericAllocationHandle multicast, CUdevice device);
using cuMulticastBindMem = CUresult(CUmemGenericAllocationHandle multicast,
                                    std::size_t multicast_offset,
                                    CUmemGenericAllocationHandle memory, std::size_t offset,
                                    std::size_t size, unsigned long long flags);
using cuMulticastBindAddr = CUresult(CUmemGenericAllocationHandle multicast,
                                     std::size_t multicast_offset, CUdeviceptr pointer,
                                     std::size_t size, unsigned long long flags);
using cuMulticastUnbind = CUresult(CUmemGenericAllocationHandle multicast, CUdevice device,
                                   std::size_t multicast_offset, std::size_t size);
// An fd travels in the pointer itself, not behind it.
using cuMemImportFromShareableHandle = CUresult(CUmemGenericAllocationHandle* handle,
                                                void* os_handle, CUmemAllocationHandleType type);
using cuMemRetainAllocationHandle = CUresult(CUmemGenericAllocationHandle* handle, void* address);
using cuMemGetAllocationPropertiesFromHandle = CUresult(CUmemAllocationProp* prop,
                                                        CUmemGenericAllocationHandle handle);

// `pid` is a process in the caller's PID namespace; the driver also takes a thread's id (a quirk).
using cuCheckpointProcessGetState = CUresult(int pid, CUprocessState* state);
using cuCheckpointProcessGetRestoreThreadId = CUresult(int pid, int* tid);
using cuCheckpointProcessLock = CUresult(int pid, CUcheckpointLockArgs* args);
using cuCheckpointProcessCheckpoint = CUresult(int pid, CUcheckpointCheckpointArgs* args);
using cuCheckpointProcessRestore = CUresult(int pid, CUcheckpointRestoreArgs* args);
using cuCheckpointProcessUnlock = CUresult(int pid, CUcheckpointUnlockArgs* args);

// NOLINTBEGIN(readability-identifier-naming): the names are NVML's
using nvmlInit_v2 = nvmlReturn_t();
using nvmlShutdown = nvmlReturn_t();
using nvmlErrorString = const char*(nvmlReturn_t result);
using nvmlSystemGetDriverVersion = nvmlReturn_t(char* version, unsigned int length);
using nvmlSystemGetCudaDriverVersion_v2 = nvmlReturn_t(int* version);
using nvmlDeviceGetCount_v2 = nvmlReturn_t(unsigned int* count);
using nvmlDeviceGetHandleByIndex_v2 = nvmlReturn_t(unsigned int index, nvmlDevice_t* device);
using nvmlDeviceGetHandleByUUID = nvmlReturn_t(const char* uuid, nvmlDevice_t* device);
using nvmlDeviceGetIndex = nvmlReturn_t(nvmlDevice_t device, unsigned int* index);
using nvmlDeviceGetUUID = nvmlReturn_t(nvmlDevice_t device, char* uuid, unsigned int length);
using nvmlDeviceGetName = nvmlReturn_t(nvmlDevice_t device, char* name, unsigned int length);
using nvmlDeviceGetMemoryInfo = nvmlReturn_t(nvmlDevice_t device, nvmlMemory_t* memory);
using nvmlDeviceGetPciInfo_v3 = nvmlReturn_t(nvmlDevice_t device, nvmlPciInfo_t* pci);
using nvmlDeviceGetComputeRunningProcesses_v3 = nvmlReturn_t(nvmlDevice_t device,
                                                             unsigned int* count,
                                                             nvmlProcessInfo_t* infos);
using nvmlDeviceGetPersistenceMode = nvmlReturn_t(nvmlDevice_t device, nvmlEnableState_t* mode);
using nvmlDeviceGetMigMode = nvmlReturn_t(nvmlDevice_t device, unsigned int* current,
                                          unsigned int* pending);
// NOLINTEND(readability-identifier-naming)
}  // namespace fn

// The symbol, a `const char* const`, that only the simulated driver exports: its presence means
// that every answer comes from a simulated GPU.
inline constexpr const char* kSimulatedMarkerSymbol = "stasis_sim_driver_version";

}  // namespace stasis::cuda
