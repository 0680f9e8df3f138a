#include "direct/device_calls.h"

#include <fmt/format.h>

namespace stasis::direct {
namespace {

struct Meaning {
  ErrorCode code;
  const char* remedy;
};

// What a result means from any call; what it means for one step alone, that step says.
Meaning meaning_of(cuda::CUresult code) {
  switch (code) {
    case cuda::CUDA_ERROR_OUT_OF_MEMORY:
      return {ErrorCode::kOutOfGpuMemory,
              "copying needs some 500 MB of each GPU: free them, or go without the direct path"};
    case cuda::CUDA_ERROR_DEVICE_UNAVAILABLE:
      return {ErrorCode::kNotSupported,
              "the GPU takes one process only (exclusive mode): nvidia-smi -c DEFAULT, or go "
              "without the direct path"};
    case cuda::CUDA_ERROR_NOT_SUPPORTED:
    case cuda::CUDA_ERROR_INVALID_DEVICE:
      return {ErrorCode::kNotSupported, "go without the direct path"};
    case cuda::CUDA_ERROR_NOT_PERMITTED:
      return {ErrorCode::kNotPermitted, "run as the user who owns the process, or as root"};
    default:
      return {ErrorCode::kDriverError, ""};
  }
}

}  // namespace

Error DeviceCalls::error(cuda::CUresult code, const char* call, const std::string& what) const {
  DriverFailure failure;
  failure.number = static_cast<int>(code);
  const char* text = nullptr;
  if (error_name(code, &text) == cuda::CUDA_SUCCESS && text != nullptr) failure.name = text;
  text = nullptr;
  if (error_text(code, &text) == cuda::CUDA_SUCCESS && text != nullptr) failure.text = text;
  if (failure.name.empty()) failure.name = fmt::format("CUresult {}", failure.number);
  const Meaning meaning = meaning_of(code);
  return Error{meaning.code,
               fmt::format("cannot {}: {} answers {}", what, call, failure.name),
               meaning.remedy,
               std::move(failure),
               {}};
}

Result<DeviceCalls> DeviceCalls::load(const std::string& name) {
  STASIS_TRY_ASSIGN(auto loaded, load_driver_library(name));
  const Library& library = loaded.library;
  DeviceCalls out;
  const char* missing = nullptr;
  const auto find = [&]<class Function>(Function*& function, const char* symbol) {
    function = library.function<Function>(symbol);
    if (function == nullptr && missing == nullptr) missing = symbol;
  };
  find(out.init, "cuInit");
  find(out.error_name, "cuGetErrorName");
  find(out.error_text, "cuGetErrorString");
  find(out.device_count, "cuDeviceGetCount");
  find(out.device, "cuDeviceGet");
  find(out.uuid, "cuDeviceGetUuid");
  find(out.retain_context, "cuDevicePrimaryCtxRetain");
  find(out.release_context, "cuDevicePrimaryCtxRelease_v2");
  find(out.set_context, "cuCtxSetCurrent");
  find(out.register_host, "cuMemHostRegister_v2");
  find(out.unregister_host, "cuMemHostUnregister");
  find(out.create_stream, "cuStreamCreate");
  find(out.destroy_stream, "cuStreamDestroy_v2");
  find(out.query_stream, "cuStreamQuery");
  find(out.copy_out, "cuMemcpyDtoHAsync_v2");
  find(out.copy_in, "cuMemcpyHtoDAsync_v2");
  find(out.copy_within, "cuMemcpyDtoDAsync_v2");
  find(out.fill, "cuMemsetD8Async");
  find(out.allocate, "cuMemAlloc_v2");
  find(out.free, "cuMemFree_v2");
  find(out.reserve, "cuMemAddressReserve");
  find(out.unreserve, "cuMemAddressFree");
  find(out.map, "cuMemMap");
  find(out.unmap, "cuMemUnmap");
  find(out.set_access, "cuMemSetAccess");
  find(out.release, "cuMemRelease");
  find(out.import, "cuMemImportFromShareableHandle");
  find(out.properties, "cuMemGetAllocationPropertiesFromHandle");
  if (missing != nullptr) {
    return fail(ErrorCode::kDriverUnsupported,
                fmt::format("{} lacks {}, which copying GPU memory needs", library.path(), missing),
                "install NVIDIA driver 570 or newer");
  }
  out.load_module = library.function<cuda::fn::cuModuleLoadData>("cuModuleLoadData");
  out.find_function = library.function<cuda::fn::cuModuleGetFunction>("cuModuleGetFunction");
  out.launch = library.function<cuda::fn::cuLaunchKernel>("cuLaunchKernel");
  return out;
}

}  // namespace stasis::direct
