// The CUDA driver for our own CUDA programs (examples, test workloads, benchmarks): loaded at run
// time, each call checked.
//
//   const CudaApi& cuda = CudaApi::load(Lookup::kDlsym);
//   cuda.cuMemAlloc_v2(&pointer, bytes);                       // ends the program if it fails
//   CUresult result = cuda.cuMemAlloc_v2.raw(&pointer, bytes); // or decide yourself
//
// These are programs, not the library: a failed call prints what failed and with what, and ends the
// program with status 1, also while other threads run. Safe to use from any thread.
#pragma once

#include <string>

#include "abi/cuda_abi.h"

namespace stasis::programs {

// Exit status of a test program that can say nothing here: no driver, no GPU, or a driver that
// lacks what is needed.
inline constexpr int kExitSkipped = 77;

// What a machine without a driver or a GPU means to a program: a failure, or "skipped: reason".
enum class IfAbsent { kFail, kSkip };

// Ends the program at once, without running destructors: other threads may be inside the driver.
[[noreturn]] void die(int status, const std::string& message);
// Ends it because of something that is not there, as CudaApi::load was told to.
[[noreturn]] void die_absent(const std::string& what);

// "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", in the driver's words where it is loaded.
std::string describe(cuda::CUresult result);

namespace internal {
[[noreturn]] void die_of_call(const char* symbol, cuda::CUresult result);
}

// One function of the driver. Without a driver, or with one that lacks it, it answers NOT_FOUND.
template <class Signature>
class Call;

template <class... Args>
class Call<cuda::CUresult(Args...)> {
 public:
  explicit constexpr Call(const char* symbol) : symbol_(symbol) {}

  // The call, or the end of the program.
  void operator()(Args... args) const {
    const cuda::CUresult result = raw(args...);
    if (result != cuda::CUDA_SUCCESS) internal::die_of_call(symbol_, result);
  }
  // The call and its result, whatever it is.
  cuda::CUresult raw(Args... args) const {
    return function_ ? function_(args...) : cuda::CUDA_ERROR_NOT_FOUND;
  }
  explicit operator bool() const { return function_ != nullptr; }
  void bind(void* address) { function_ = reinterpret_cast<cuda::CUresult (*)(Args...)>(address); }

 private:
  const char* symbol_;
  cuda::CUresult (*function_)(Args...) = nullptr;
};

// Every function our programs use: the symbol that libcuda.so.1 exports, and the CUDA version that
// has to be named to cuGetProcAddress to get that very one (a later version may mean a successor
// with other arguments, as with cuCtxCreate).
#define STASIS_PROGRAMS_CUDA_SYMBOLS(X)   \
  X(cuInit, 2000)                         \
  X(cuDriverGetVersion, 2020)             \
  X(cuDeviceGet, 2000)                    \
  X(cuDeviceGetCount, 2000)               \
  X(cuDeviceGetName, 2000)                \
  X(cuDeviceGetUuid_v2, 11040)            \
  X(cuDeviceGetAttribute, 2000)           \
  X(cuDeviceCanAccessPeer, 4000)          \
  X(cuDevicePrimaryCtxRetain, 7000)       \
  X(cuDevicePrimaryCtxRelease_v2, 11000)  \
  X(cuCtxCreate_v2, 3020)                 \
  X(cuCtxDestroy_v2, 4000)                \
  X(cuCtxSetCurrent, 4000)                \
  X(cuCtxGetCurrent, 4000)                \
  X(cuCtxEnablePeerAccess, 4000)          \
  X(cuCtxSynchronize, 2000)               \
  X(cuMemGetInfo_v2, 3020)                \
  X(cuMemAlloc_v2, 3020)                  \
  X(cuMemAllocPitch_v2, 3020)             \
  X(cuMemFree_v2, 3020)                   \
  X(cuMemAllocHost_v2, 3020)              \
  X(cuMemHostAlloc, 2020)                 \
  X(cuMemFreeHost, 2000)                  \
  X(cuMemHostRegister_v2, 6050)           \
  X(cuMemHostUnregister, 4000)            \
  X(cuMemHostGetDevicePointer_v2, 3020)   \
  X(cuMemAllocManaged, 6000)              \
  X(cuMemAdvise, 8000)                    \
  X(cuMemPrefetchAsync, 8000)             \
  X(cuMemRangeGetAttribute, 8000)         \
  X(cuMemAllocAsync, 11020)               \
  X(cuMemFreeAsync, 11020)                \
  X(cuIpcGetMemHandle, 4010)              \
  X(cuIpcOpenMemHandle_v2, 11000)         \
  X(cuIpcCloseMemHandle, 4010)            \
  X(cuMemcpyHtoD_v2, 3020)                \
  X(cuMemcpyHtoDAsync_v2, 3020)           \
  X(cuMemcpyDtoH_v2, 3020)                \
  X(cuMemcpyDtoHAsync_v2, 3020)           \
  X(cuMemcpyDtoDAsync_v2, 3020)           \
  X(cuMemsetD8_v2, 3020)                  \
  X(cuMemsetD8Async, 3020)                \
  X(cuStreamCreate, 2000)                 \
  X(cuStreamDestroy_v2, 4000)             \
  X(cuStreamQuery, 2000)                  \
  X(cuStreamSynchronize, 2000)            \
  X(cuStreamWaitEvent, 3020)              \
  X(cuLaunchHostFunc, 10000)              \
  X(cuEventCreate, 2000)                  \
  X(cuEventDestroy_v2, 4000)              \
  X(cuEventRecord, 2000)                  \
  X(cuEventQuery, 2000)                   \
  X(cuEventSynchronize, 2000)             \
  X(cuModuleLoadData, 2000)               \
  X(cuModuleUnload, 2000)                 \
  X(cuModuleGetFunction, 2000)            \
  X(cuModuleGetGlobal_v2, 3020)           \
  X(cuLaunchKernel, 4000)                 \
  X(cuMemAddressReserve, 10020)           \
  X(cuMemAddressFree, 10020)              \
  X(cuMemCreate, 10020)                   \
  X(cuMemRelease, 10020)                  \
  X(cuMemMap, 10020)                      \
  X(cuMemUnmap, 10020)                    \
  X(cuMemSetAccess, 10020)                \
  X(cuMemGetAllocationGranularity, 10020) \
  X(cuMemExportToShareableHandle, 10020)  \
  X(cuMemRetainAllocationHandle, 11000)   \
  X(cuMemImportFromShareableHandle, 10020)

// How the functions are found: CUDA programs do it in both ways, and what stands between a
// program and its driver has to serve both. The third is the second with each thread's own default
// stream.
enum class Lookup { kDlsym, kGetProcAddress, kPerThreadDefaultStream };

struct CudaApi {
  // Loads libcuda.so.1; the first call decides, later ones return the same. Ends the program if
  // there is no driver.
  static const CudaApi& load(Lookup lookup = Lookup::kDlsym, IfAbsent absent = IfAbsent::kFail);

  // The address of a symbol that the list lacks, null if the driver lacks it too.
  static void* find(const char* symbol);

  // True on the simulated driver.
  bool simulated = false;

#define STASIS_PROGRAMS_MEMBER(symbol, version) Call<cuda::fn::symbol> symbol{#symbol};
  STASIS_PROGRAMS_CUDA_SYMBOLS(STASIS_PROGRAMS_MEMBER)
#undef STASIS_PROGRAMS_MEMBER
};

}  // namespace stasis::programs
