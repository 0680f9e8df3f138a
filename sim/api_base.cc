// Initialisation, versions, errors, and looking functions up by name.
#include <cstring>
#include <string_view>

#include "sim/api.h"
#include "sim/driver.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

#define STASIS_SIM_ERROR(code, text) \
  { code, #code, text }
constexpr ErrorText kErrors[] = {
    STASIS_SIM_ERROR(CUDA_SUCCESS, "no error"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    STASIS_SIM_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    STASIS_SIM_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    STASIS_SIM_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    STASIS_SIM_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    STASIS_SIM_ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    STASIS_SIM_ERROR(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_SOURCE, "device kernel image is invalid"),
    STASIS_SIM_ERROR(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
    STASIS_SIM_ERROR(CUDA_ERROR_OPERATING_SYSTEM,
                     "OS call failed or operation not supported on this OS"),
    STASIS_SIM_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    STASIS_SIM_ERROR(CUDA_ERROR_ILLEGAL_STATE,
                     "the operation cannot be performed in the present state"),
    STASIS_SIM_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    STASIS_SIM_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    STASIS_SIM_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    STASIS_SIM_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    STASIS_SIM_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    STASIS_SIM_ERROR(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    STASIS_SIM_ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
                     "cannot set while device is active in this process"),
    STASIS_SIM_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    STASIS_SIM_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                     "part or all of the requested memory range is already mapped"),
    STASIS_SIM_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                     "pointer does not correspond to a registered memory region"),
    STASIS_SIM_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    STASIS_SIM_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    STASIS_SIM_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    STASIS_SIM_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef STASIS_SIM_ERROR

const ErrorText* find_error(CUresult code) {
  for (const auto& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

struct Entry {
  std::string_view name;
  int version;
  void* function;
};

#define STASIS_SIM_ENTRY(symbol, name, version) \
  {name, version, reinterpret_cast<void*>(&stasis_sim_entry_##symbol)},
const Entry kEntries[] = {STASIS_SIM_API(STASIS_SIM_ENTRY){
    "cuGetProcAddress", 11030, reinterpret_cast<void*>(&stasis_sim_entry_cuGetProcAddress)}};
#undef STASIS_SIM_ENTRY

// The newest version of a function that a program built for `version` can use.
CUdriverProcAddressQueryResult look_up(std::string_view name, int version, void*& out) {
  Config config;
  std::string error;
  if (!load(config, error)) config = Config{};
  const Entry* best = nullptr;
  bool known = false;
  for (const auto& entry : kEntries) {
    if (entry.name != name || entry.version > config.cuda_version()) continue;
    known = true;
    if (entry.version <= version && (!best || entry.version > best->version)) best = &entry;
  }
  out = best ? best->function : nullptr;
  if (best) return CU_GET_PROC_ADDRESS_SUCCESS;
  return known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

}  // namespace

// The mark that tells every tool that this is no real GPU.
// NOLINTNEXTLINE(readability-identifier-naming): a symbol of the C interface
extern "C" const char* const stasis_sim_driver_version;
extern "C" const char* const stasis_sim_driver_version = "stasis simulated driver 1";

CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!live_driver()) return start_driver();
  return gated([](Driver&) { return CUDA_SUCCESS; });  // even the second one waits for the lock
}

CUresult cuDriverGetVersion(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  Config config;
  std::string error;
  if (!load(config, error)) return CUDA_ERROR_INVALID_SOURCE;
  *version = config.cuda_version();
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  const auto* found = find_error(error);
  *name = found ? found->name : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  const auto* found = find_error(error);
  *text = found ? found->text : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int cuda_version,
                             std::uint64_t flags, CUdriverProcAddressQueryResult* status) {
  if (!symbol || !function || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto result = look_up(symbol, cuda_version, *function);
  if (status) {
    *status = result;
    return CUDA_SUCCESS;
  }
  return result == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char* symbol, void** function, int cuda_version,
                          std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, cuda_version, flags, nullptr);
}
