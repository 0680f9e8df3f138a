// The driver, its kernel module, the GPUs and how they are shared.
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "abi/cuda_abi.h"
#include "base/scope_guard.h"
#include "base/units.h"
#include "doctor/machine_parts.h"
#include "driver/library.h"
#include "proc/procfs.h"

namespace stasis::doctor {
namespace {

namespace fn = cuda::fn;

// "580.159.04" of a libcuda.so.580.159.04, which is what the name of the library leads to.
std::string version_of_file(const std::string& path) {
  constexpr std::string_view kStem = "libcuda.so.";
  const std::size_t at = path.rfind(kStem);
  if (at == std::string::npos) return {};
  std::string version = path.substr(at + kStem.size());
  const bool whole = version.find('.') != std::string::npos &&
                     version.find_first_not_of("0123456789.") == std::string::npos;
  return whole ? version : std::string();
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> found(::realpath(path.c_str(), nullptr),
                                                          &std::free);
  return found ? found.get() : path;
}

// The library that programs load and the module in the kernel must be of one version.
void probe_module(const DriverInfo& info, Obstacles& out) {
  const std::string path = real_path(info.library);
  const std::string library = version_of_file(path);
  if (info.simulated || library.empty() || info.driver_version.empty()) return;
  if (library == info.driver_version) {
    out.push_back(green("driver-module",
                        fmt::format("kernel module and library are both {}", info.driver_version)));
  } else if (path.find("/compat/") != std::string::npos) {
    out.push_back(
        yellow("driver-module",
               fmt::format("library {} of a compatibility package ({}) on kernel module {}",
                           library, path, info.driver_version),
               "if the trial fails, use the driver's own libcuda.so.1 (LD_LIBRARY_PATH, or "
               "STASIS_LIBCUDA for stasis alone)"));
  } else {
    out.push_back(red("driver-module",
                      fmt::format("the library is {} ({}) and the kernel module is {}", library,
                                  path, info.driver_version),
                      "the driver was changed while the module was loaded: load the module again, "
                      "or reboot; in a container, let the NVIDIA runtime mount the library"));
  }
}

// With persistence mode off for some: the names of those. Nothing if NVML cannot say.
std::optional<std::vector<std::string>> not_persistent(const Driver& driver,
                                                       const std::vector<Gpu>& gpus) {
  // As src/driver chooses it: beside the library that was named.
  std::string name = "libnvidia-ml.so.1";
  const std::string& libcuda = driver.info().library;
  if (std::getenv("STASIS_LIBCUDA") != nullptr && libcuda.find('/') != std::string::npos)
    name.insert(0, libcuda, 0, libcuda.rfind('/') + 1);
  auto library = Library::load(name);
  if (!library) return std::nullopt;
  auto* init = library->function<fn::nvmlInit_v2>("nvmlInit_v2");
  auto* end = library->function<fn::nvmlShutdown>("nvmlShutdown");
  auto* handle = library->function<fn::nvmlDeviceGetHandleByUUID>("nvmlDeviceGetHandleByUUID");
  auto* ask = library->function<fn::nvmlDeviceGetPersistenceMode>("nvmlDeviceGetPersistenceMode");
  if (init == nullptr || end == nullptr || handle == nullptr || ask == nullptr ||
      init() != cuda::NVML_SUCCESS) {
    return std::nullopt;
  }
  const ScopeGuard shutdown([&] { (void)end(); });
  std::vector<std::string> off;
  for (const Gpu& gpu : gpus) {
    cuda::nvmlDevice_t device{};
    cuda::nvmlEnableState_t mode{};
    if (handle(gpu.uuid.to_string().c_str(), &device) != cuda::NVML_SUCCESS ||
        ask(device, &mode) != cuda::NVML_SUCCESS) {
      return std::nullopt;
    }
    if (mode != cuda::NVML_FEATURE_ENABLED) off.push_back(gpu.pci_bus_id);
  }
  return off;
}

void probe_persistence(const Driver& driver, const std::vector<Gpu>& gpus, Obstacles& out) {
  const auto off = not_persistent(driver, gpus);
  if (!off) return;
  if (off->empty()) {
    out.push_back(green("persistence", "persistence mode is on"));
    return;
  }
  out.push_back(yellow(
      "persistence",
      fmt::format("persistence mode is off ({}): the first restore after the GPU was idle costs "
                  "up to 2.7 s",
                  fmt::join(*off, ", ")),
      "nvidia-smi -pm 1, or start nvidia-persistenced"));
}

}  // namespace

void probe_driver(const Driver& driver, Obstacles& out) {
  const DriverInfo& info = driver.info();
  const std::string what =
      fmt::format("driver {} (CUDA {}.{}, {})",
                  info.driver_version.empty() ? "of unknown version" : info.driver_version,
                  info.cuda_version / 1000, info.cuda_version % 1000 / 10, info.library);
  if (!info.has_device_map) {
    out.push_back(yellow("driver", what + ": restores to the same GPUs only",
                         "install driver 580 or newer to move programs to other GPUs"));
  } else {
    out.push_back(green("driver", what + ": can move programs to other GPUs" +
                                      (info.has_jobs ? ", and launch jobs" : "")));
  }
  probe_module(info, out);
}

void probe_gpus(const Driver& driver, const Result<std::vector<Gpu>>& gpus, Obstacles& out) {
  if (!gpus) {
    out.push_back(from_error(Severity::kRed, "gpus", gpus.error(), "check that nvidia-smi works"));
    return;
  }
  if (gpus->empty()) {
    out.push_back(red("gpus", "the driver sees no GPU",
                      "check that nvidia-smi shows one; in a container, start it with the NVIDIA "
                      "runtime"));
    return;
  }
  std::vector<std::string> divided;
  for (std::size_t i = 0; i < gpus->size(); ++i) {
    const Gpu& gpu = (*gpus)[i];
    out.push_back(
        green("gpus", fmt::format("GPU {}: {}, {}, {}, {} of {} in use", i, gpu.name,
                                  gpu.uuid.to_string(), gpu.pci_bus_id,
                                  format_bytes(gpu.memory_used), format_bytes(gpu.memory_total))));
    if (gpu.mig) divided.push_back(gpu.pci_bus_id);
  }
  if (!divided.empty()) {
    out.push_back(yellow("mig",
                         fmt::format("divided into instances (MIG): {}; the driver cannot "
                                     "checkpoint programs there",
                                     fmt::join(divided, ", ")),
                         "run programs on a GPU without MIG, or switch it off: nvidia-smi -i GPU "
                         "-mig 0"));
  }
  probe_persistence(driver, *gpus, out);
}

void probe_mps(const KernelFolders& folders, Obstacles& out) {
  // As src/checkpoint/driver_obstacles.cc knows it: nvidia-cuda-mps-control and -server, cut to 15
  // characters by the kernel.
  constexpr std::string_view kComm = "nvidia-cuda-mps";
  const auto all = proc::ProcFs(folders.proc).all();
  if (!all) return;
  std::vector<int> daemons;
  for (const proc::ProcessInfo& info : *all) {
    if (std::string_view(info.comm).starts_with(kComm) && !info.has_ended())
      daemons.push_back(info.pid.value);
  }
  if (daemons.empty()) return;
  out.push_back(yellow(
      "mps",
      fmt::format("MPS is running (process {}): the driver cannot checkpoint programs that started "
                  "under it",
                  fmt::join(daemons, ", ")),
      "start programs with another CUDA_MPS_PIPE_DIRECTORY, or end MPS: `quit` to "
      "nvidia-cuda-mps-control"));
}

std::uint64_t gpu_memory_in_use(Driver& driver, const std::vector<Gpu>& gpus) {
  std::uint64_t bytes = 0;
  if (const auto use = driver.memory_by_process()) {
    for (const auto& [pid, parts] : *use)
      bytes += total_bytes(parts);
  }
  if (bytes > 0) return bytes;
  // In some containers NVML does not know processes. What the driver itself holds counts here, too.
  for (const Gpu& gpu : gpus)
    bytes += gpu.memory_used;
  return bytes;
}

}  // namespace stasis::doctor
