#include "driver/nvml.h"

#include <array>

#include <fmt/format.h>

#include "abi/cuda_abi.h"

namespace stasis {
namespace {

namespace fn = cuda::fn;
using cuda::nvmlDevice_t;
using cuda::nvmlReturn_t;

constexpr const char* kSoname = "libnvidia-ml.so.1";

Error nvml_error(const Library& library, const char* what, nvmlReturn_t code) {
  auto* text = library.function<fn::nvmlErrorString>("nvmlErrorString");
  return Error{ErrorCode::kDriverError,
               fmt::format("NVML: {} failed: {} ({})", what, text != nullptr ? text(code) : "?",
                           static_cast<int>(code)),
               "check that nvidia-smi works"};
}

// Calls an NVML function by name; a missing symbol counts as NVML_ERROR_FUNCTION_NOT_FOUND.
template <class Function, class... Args>
nvmlReturn_t call(const Library& library, const char* name, Args... args) {
  auto* function = library.function<Function>(name);
  return function == nullptr ? cuda::NVML_ERROR_FUNCTION_NOT_FOUND : function(args...);
}

#define STASIS_NVML(library, name, ...) call<fn::name>(library, #name, __VA_ARGS__)

Result<std::vector<nvmlDevice_t>> devices(const Library& library) {
  unsigned count = 0;
  if (auto code = STASIS_NVML(library, nvmlDeviceGetCount_v2, &count); code != cuda::NVML_SUCCESS) {
    return fail(nvml_error(library, "nvmlDeviceGetCount", code));
  }
  std::vector<nvmlDevice_t> out;
  for (unsigned i = 0; i < count; ++i) {
    nvmlDevice_t device{};
    if (auto code = STASIS_NVML(library, nvmlDeviceGetHandleByIndex_v2, i, &device);
        code != cuda::NVML_SUCCESS) {
      return fail(nvml_error(library, "nvmlDeviceGetHandleByIndex", code));
    }
    out.push_back(device);
  }
  return out;
}

Result<GpuUuid> uuid_of(const Library& library, nvmlDevice_t device) {
  std::array<char, 96> text{};
  if (auto code = STASIS_NVML(library, nvmlDeviceGetUUID, device, text.data(),
                              static_cast<unsigned>(text.size()));
      code != cuda::NVML_SUCCESS) {
    return fail(nvml_error(library, "nvmlDeviceGetUUID", code));
  }
  auto uuid = GpuUuid::parse(text.data());
  if (!uuid) {
    return fail(ErrorCode::kInternal, fmt::format("NVML names a GPU '{}'", text.data()));
  }
  return *uuid;
}

}  // namespace

Result<std::unique_ptr<Nvml>> Nvml::load(const std::string& libcuda_path, bool beside) {
  std::string name = kSoname;
  if (beside && libcuda_path.find('/') != std::string::npos) {
    name = libcuda_path.substr(0, libcuda_path.rfind('/') + 1) + kSoname;
  }
  auto library = Library::load(name);
  if (!library && name != kSoname) library = Library::load(kSoname);
  if (!library) {
    return fail(ErrorCode::kDriverMissing, "cannot load NVML: " + library.error(),
                "install the NVIDIA driver's libnvidia-ml.so.1 (package libnvidia-ml1 or "
                "libnvidia-compute-*)");
  }
  auto nvml = std::unique_ptr<Nvml>(new Nvml(std::move(*library)));
  auto* init = nvml->library_.function<fn::nvmlInit_v2>("nvmlInit_v2");
  const nvmlReturn_t code = init == nullptr ? cuda::NVML_ERROR_FUNCTION_NOT_FOUND : init();
  if (code != cuda::NVML_SUCCESS) return fail(nvml_error(nvml->library_, "nvmlInit", code));
  return nvml;
}

Nvml::~Nvml() {
  if (auto* shutdown = library_.function<fn::nvmlShutdown>("nvmlShutdown")) (void)shutdown();
}

std::string Nvml::driver_version() const {
  std::array<char, 96> text{};
  const auto code = STASIS_NVML(library_, nvmlSystemGetDriverVersion, text.data(),
                                static_cast<unsigned>(text.size()));
  return code == cuda::NVML_SUCCESS ? std::string(text.data()) : std::string();
}

Result<std::vector<Gpu>> Nvml::gpus() const {
  STASIS_TRY_ASSIGN(auto all, devices(library_));
  std::vector<Gpu> out;
  for (nvmlDevice_t device : all) {
    Gpu gpu;
    STASIS_TRY_ASSIGN(auto uuid, uuid_of(library_, device));
    gpu.uuid = uuid;
    std::array<char, 96> name{};
    if (STASIS_NVML(library_, nvmlDeviceGetName, device, name.data(),
                    static_cast<unsigned>(name.size())) == cuda::NVML_SUCCESS) {
      gpu.name = name.data();
    }
    cuda::nvmlPciInfo_t pci{};
    if (STASIS_NVML(library_, nvmlDeviceGetPciInfo_v3, device, &pci) == cuda::NVML_SUCCESS) {
      gpu.pci_bus_id = static_cast<const char*>(pci.busId);
    }
    cuda::nvmlMemory_t memory{};
    if (auto code = STASIS_NVML(library_, nvmlDeviceGetMemoryInfo, device, &memory);
        code != cuda::NVML_SUCCESS) {
      return fail(nvml_error(library_, "nvmlDeviceGetMemoryInfo", code));
    }
    gpu.memory_total = memory.total;
    gpu.memory_used = memory.used;
    unsigned mig = 0;
    unsigned after_reset = 0;
    gpu.mig = STASIS_NVML(library_, nvmlDeviceGetMigMode, device, &mig, &after_reset) ==
                  cuda::NVML_SUCCESS &&
              mig == 1;
    out.push_back(std::move(gpu));
  }
  return out;
}

Result<std::map<Pid, std::vector<GpuUse>>> Nvml::memory_by_process() const {
  STASIS_TRY_ASSIGN(auto all, devices(library_));
  std::map<Pid, std::vector<GpuUse>> out;
  for (nvmlDevice_t device : all) {
    STASIS_TRY_ASSIGN(auto uuid, uuid_of(library_, device));
    // The number of processes may grow between asking for it and asking for them.
    std::vector<cuda::nvmlProcessInfo_t> infos(64);
    nvmlReturn_t code = cuda::NVML_ERROR_INSUFFICIENT_SIZE;
    while (code == cuda::NVML_ERROR_INSUFFICIENT_SIZE && infos.size() <= 65536) {
      auto count = static_cast<unsigned>(infos.size());
      code = STASIS_NVML(library_, nvmlDeviceGetComputeRunningProcesses_v3, device, &count,
                         infos.data());
      if (code == cuda::NVML_SUCCESS) {
        infos.resize(count);
      } else {
        infos.resize(infos.size() * 4);
      }
    }
    if (code != cuda::NVML_SUCCESS) {
      return fail(nvml_error(library_, "nvmlDeviceGetComputeRunningProcesses", code));
    }
    for (const auto& info : infos) {
      // All ones: "not available" (nvmlProcessInfo_t in NVML's documentation).
      if (info.usedGpuMemory == ~0ULL) continue;
      out[Pid{static_cast<int>(info.pid)}].push_back({uuid, info.usedGpuMemory});
    }
  }
  return out;
}

}  // namespace stasis
