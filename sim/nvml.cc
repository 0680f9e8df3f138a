// The few NVML functions that say which GPUs there are and who uses them. The library is found
// under NVML's name too (libnvidia-ml.so.1 beside libcuda.so.1). They read files and take no lock,
// so they answer while a process of the GPU, even this one, is locked.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "sim/config.h"
#include "sim/idle_thread.h"
#include "sim/registry.h"

using namespace stasis::cuda;  // NOLINT: this file is NVML's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

extern "C" {
// clang-format off
#define STASIS_SIM_NVML(X)                                                        \
  X(nvmlInit_v2)                       X(nvmlShutdown)                            \
  X(nvmlErrorString)                   X(nvmlSystemGetDriverVersion)              \
  X(nvmlSystemGetCudaDriverVersion_v2) X(nvmlDeviceGetCount_v2)                   \
  X(nvmlDeviceGetHandleByIndex_v2)     X(nvmlDeviceGetHandleByUUID)               \
  X(nvmlDeviceGetIndex)                X(nvmlDeviceGetUUID)                       \
  X(nvmlDeviceGetName)                 X(nvmlDeviceGetMemoryInfo)                 \
  X(nvmlDeviceGetPciInfo_v3)           X(nvmlDeviceGetComputeRunningProcesses_v3) \
  X(nvmlDeviceGetPersistenceMode)      X(nvmlDeviceGetMigMode)
// clang-format on
#define STASIS_SIM_DECLARE(symbol) fn::symbol symbol;
STASIS_SIM_NVML(STASIS_SIM_DECLARE)
#undef STASIS_SIM_DECLARE
}

namespace {

std::atomic<int> initialised{0};

template <class F>
nvmlReturn_t with_machine(F&& body) {
  if (initialised.load() <= 0) return NVML_ERROR_UNINITIALIZED;
  Config config;
  std::string error;
  if (!load(config, error)) return NVML_ERROR_UNKNOWN;
  return body(config);
}

// A handle is the GPU's index plus one.
nvmlDevice_t handle_of(std::size_t index) { return reinterpret_cast<nvmlDevice_t>(index + 1); }

template <class F>
nvmlReturn_t with_gpu(nvmlDevice_t device, F&& body) {
  return with_machine([&](const Config& config) -> nvmlReturn_t {
    const auto index = reinterpret_cast<std::uintptr_t>(device) - 1;
    if (index >= config.gpus.size()) return NVML_ERROR_INVALID_ARGUMENT;
    return body(config, config.gpus[index], index);
  });
}

nvmlReturn_t copy_text(const std::string& text, char* out, unsigned length) {
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  if (length <= text.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}

}  // namespace

nvmlReturn_t nvmlInit_v2() {
  Config config;
  std::string error;
  if (!load(config, error)) return NVML_ERROR_UNKNOWN;
  if (config.gpus.empty()) return NVML_ERROR_DRIVER_NOT_LOADED;
  start_idle_thread();
  ++initialised;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown() {
  if (initialised.load() <= 0) return NVML_ERROR_UNINITIALIZED;
  --initialised;
  return NVML_SUCCESS;
}

const char* nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS:
      return "Success";
    case NVML_ERROR_UNINITIALIZED:
      return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
      return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
      return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
      return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
      return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
      return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
      return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
      return "GPU is lost";
    case NVML_ERROR_UNKNOWN:
      break;
  }
  return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned int length) {
  return with_machine(
      [&](const Config& config) { return copy_text(config.driver_text(), version, length); });
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return with_machine([&](const Config& config) -> nvmlReturn_t {
    if (!version) return NVML_ERROR_INVALID_ARGUMENT;
    *version = config.cuda_version();
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int* count) {
  return with_machine([&](const Config& config) -> nvmlReturn_t {
    if (!count) return NVML_ERROR_INVALID_ARGUMENT;
    *count = static_cast<unsigned>(config.gpus.size());
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t* device) {
  return with_machine([&](const Config& config) -> nvmlReturn_t {
    if (!device || index >= config.gpus.size()) return NVML_ERROR_INVALID_ARGUMENT;
    *device = handle_of(index);
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  return with_machine([&](const Config& config) -> nvmlReturn_t {
    if (!uuid || !device) return NVML_ERROR_INVALID_ARGUMENT;
    for (std::size_t i = 0; i < config.gpus.size(); ++i) {
      if (to_text(config.gpus[i].uuid) != uuid) continue;
      *device = handle_of(i);
      return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
  });
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int* out) {
  return with_gpu(device, [&](const Config&, const GpuSpec&, std::size_t index) -> nvmlReturn_t {
    if (!out) return NVML_ERROR_INVALID_ARGUMENT;
    *out = static_cast<unsigned>(index);
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned int length) {
  return with_gpu(device, [&](const Config&, const GpuSpec& gpu, std::size_t) {
    return copy_text(to_text(gpu.uuid), uuid, length);
  });
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned int length) {
  return with_gpu(device, [&](const Config&, const GpuSpec& gpu, std::size_t) {
    return copy_text(gpu.name, name, length);
  });
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  return with_gpu(device, [&](const Config& config, const GpuSpec& gpu, std::size_t) {
    if (!memory) return NVML_ERROR_INVALID_ARGUMENT;
    memory->total = gpu.capacity;
    memory->used = std::min(gpu.capacity, usage(config.dir, gpu.uuid).used);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* pci) {
  return with_gpu(device, [&](const Config&, const GpuSpec& gpu, std::size_t) {
    if (!pci) return NVML_ERROR_INVALID_ARGUMENT;
    *pci = nvmlPciInfo_t{};
    pci->bus = gpu.pci_bus;
    const auto text = pci_text(gpu.pci_bus);
    std::snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%s", text.c_str());
    std::snprintf(pci->busId, sizeof pci->busId, "0000%s", text.c_str());
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int* count,
                                                     nvmlProcessInfo_t* infos) {
  return with_gpu(device, [&](const Config& config, const GpuSpec& gpu, std::size_t) {
    if (!count) return NVML_ERROR_INVALID_ARGUMENT;
    const auto who = usage(config.dir, gpu.uuid);
    const auto room = *count;
    *count = static_cast<unsigned>(who.processes.size());
    if (room < who.processes.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
    if (!infos && room) return NVML_ERROR_INVALID_ARGUMENT;
    for (std::size_t i = 0; i < who.processes.size(); ++i) {
      infos[i] = {static_cast<unsigned>(who.processes[i].pid), who.processes[i].bytes, ~0u, ~0u};
    }
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t* mode) {
  return with_gpu(device, [&](const Config& config, const GpuSpec&, std::size_t) {
    if (!mode) return NVML_ERROR_INVALID_ARGUMENT;
    *mode = config.persistence ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
  });
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int* current,
                                  unsigned int* pending) {
  return with_gpu(device, [&](const Config& config, const GpuSpec&, std::size_t) {
    if (!current || !pending) return NVML_ERROR_INVALID_ARGUMENT;
    *current = config.mig ? 1 : 0;
    *pending = *current;
    return NVML_SUCCESS;
  });
}
