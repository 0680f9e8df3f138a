// The driver's checkpoint calls and nothing else, timed: what our tools are measured against, and
// an observer of a process's CUDA state that shares no code with them.
//
//   stasis-raw-driver --pid P lock checkpoint restore unlock
//
// prints one JSON object. Steps run in the order given and stop at the first that the driver
// refuses; the exit status is then 1. `gpus` lists the GPUs' UUIDs, `memory` what is used
// of each. The driver is the file named by
// STASIS_LIBCUDA, else libcuda.so.1.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "abi/cuda_abi.h"
#include "base/cuda_state.h"

namespace {

namespace cuda = stasis::cuda;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Settings {
  int pid = 0;
  unsigned timeout_ms = 10000;
  std::string device_map;  // "GPU-a=GPU-b,GPU-b=GPU-a"
  std::vector<std::string> steps;
};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "stasis-raw-driver: %s\n", message.c_str());
  std::exit(2);
}

class Library {
 public:
  explicit Library(const std::string& file)
      : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (!handle_) fail(std::string("no CUDA driver: ") + dlerror());
  }
  template <class F>
  F* get(const char* symbol) const {
    auto* function = reinterpret_cast<F*>(dlsym(handle_, symbol));
    if (!function) fail(std::string("the library has no ") + symbol);
    return function;
  }
  bool simulated() const { return dlsym(handle_, cuda::kSimulatedMarkerSymbol) != nullptr; }

 private:
  void* handle_;
};
#define GET(library, symbol) (library).get<cuda::fn::symbol>(#symbol)

// The driver's UUID bytes and ours have different types.
std::string uuid_text(const cuda::CUuuid& uuid) {
  stasis::GpuUuid ours;
  std::memcpy(ours.bytes.data(), uuid.bytes, sizeof uuid.bytes);
  return ours.to_string();
}

cuda::CUuuid uuid_from(const std::string& text) {
  const auto parsed = stasis::GpuUuid::parse(text);
  if (!parsed) fail("not a GPU's UUID: " + text);
  cuda::CUuuid uuid{};
  std::memcpy(uuid.bytes, parsed->bytes.data(), sizeof uuid.bytes);
  return uuid;
}

std::vector<cuda::CUcheckpointGpuPair> parse_map(const std::string& text) {
  std::vector<cuda::CUcheckpointGpuPair> pairs;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = text.find(',', at);
    if (end == std::string::npos) end = text.size();
    const std::string pair = text.substr(at, end - at);
    const auto equals = pair.find('=');
    if (equals == std::string::npos) fail("not OLD=NEW: " + pair);
    pairs.push_back({uuid_from(pair.substr(0, equals)), uuid_from(pair.substr(equals + 1))});
    at = end + 1;
  }
  return pairs;
}

class Session {
 public:
  explicit Session(Settings settings) : settings_(std::move(settings)) {}

  // Appends what happened to `out`; false if the driver refused.
  bool step(const std::string& name, json& out) {
    json record{{"action", name}};
    const auto start = Clock::now();
    const cuda::CUresult result = call(name, record);
    record["seconds"] = std::chrono::duration<double>(Clock::now() - start).count();
    const char* text = nullptr;
    GET(library_, cuGetErrorName)(result, &text);
    record["result"] = static_cast<unsigned>(result);
    record["name"] = text ? text : "?";
    out.push_back(record);
    return result == cuda::CUDA_SUCCESS;
  }
  bool simulated() const { return library_.simulated(); }

 private:
  cuda::CUresult call(const std::string& name, json& record) {
    const int pid = settings_.pid;
    if (name == "init") return GET(library_, cuInit)(0);
    if (name == "gpus") return gpus(record);
    if (name == "memory") return memory(record);
    if (name == "state") {
      auto state = cuda::CU_PROCESS_STATE_RUNNING;
      const cuda::CUresult result = GET(library_, cuCheckpointProcessGetState)(pid, &state);
      if (result == cuda::CUDA_SUCCESS) {
        record["value"] = stasis::cuda_state_name(static_cast<stasis::CudaState>(state));
      }
      return result;
    }
    if (name == "tid") {
      int tid = 0;
      const auto result = GET(library_, cuCheckpointProcessGetRestoreThreadId)(pid, &tid);
      if (result == cuda::CUDA_SUCCESS) record["value"] = tid;
      return result;
    }
    if (name == "lock") {
      cuda::CUcheckpointLockArgs args{};
      args.timeoutMs = settings_.timeout_ms;
      return GET(library_, cuCheckpointProcessLock)(pid, &args);
    }
    if (name == "checkpoint") return GET(library_, cuCheckpointProcessCheckpoint)(pid, nullptr);
    if (name == "restore") {
      auto pairs = parse_map(settings_.device_map);
      cuda::CUcheckpointRestoreArgs args{};
      args.gpuPairs = pairs.data();
      args.gpuPairsCount = static_cast<unsigned>(pairs.size());
      return GET(library_, cuCheckpointProcessRestore)(pid, pairs.empty() ? nullptr : &args);
    }
    if (name == "unlock") return GET(library_, cuCheckpointProcessUnlock)(pid, nullptr);
    fail("unknown step \"" + name +
         "\"; the steps are init, gpus, memory, state, tid, lock, checkpoint, restore, unlock");
  }

  cuda::CUresult gpus(json& record) {
    int count = 0;
    cuda::CUresult result = GET(library_, cuInit)(0);
    if (result == cuda::CUDA_SUCCESS) result = GET(library_, cuDeviceGetCount)(&count);
    record["value"] = json::array();
    for (int i = 0; i < count && result == cuda::CUDA_SUCCESS; ++i) {
      cuda::CUdevice device = 0;
      cuda::CUuuid uuid{};
      char name[128] = "";
      GET(library_, cuDeviceGet)(&device, i);
      GET(library_, cuDeviceGetName)(name, sizeof name, device);
      result = GET(library_, cuDeviceGetUuid_v2)(&uuid, device);
      record["value"].push_back({{"name", name}, {"uuid", uuid_text(uuid)}});
    }
    return result;
  }

  // Used memory of each GPU, as NVML tells it: also those that CUDA_VISIBLE_DEVICES hides.
  static cuda::CUresult memory(json& record) {
    const Library nvml("libnvidia-ml.so.1");
    unsigned count = 0;
    if (GET(nvml, nvmlInit_v2)() != cuda::NVML_SUCCESS ||
        GET(nvml, nvmlDeviceGetCount_v2)(&count) != cuda::NVML_SUCCESS) {
      fail("NVML does not work here");
    }
    record["value"] = json::array();
    for (unsigned i = 0; i < count; ++i) {
      cuda::nvmlDevice_t device = nullptr;
      cuda::nvmlMemory_t use{};
      char uuid[96] = "";
      if (GET(nvml, nvmlDeviceGetHandleByIndex_v2)(i, &device) != cuda::NVML_SUCCESS ||
          GET(nvml, nvmlDeviceGetUUID)(device, uuid, sizeof uuid) != cuda::NVML_SUCCESS ||
          GET(nvml, nvmlDeviceGetMemoryInfo)(device, &use) != cuda::NVML_SUCCESS) {
        fail("NVML has no answer about GPU " + std::to_string(i));
      }
      record["value"].push_back({{"uuid", uuid}, {"used", use.used}});
    }
    return cuda::CUDA_SUCCESS;
  }

  static std::string driver_file() {
    const char* file = std::getenv("STASIS_LIBCUDA");
    return file && *file ? file : "libcuda.so.1";
  }

  Settings settings_;
  const Library library_{driver_file()};
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Calls the driver's checkpoint functions on a process and times them.");
  app.add_option("--pid", settings.pid, "the process");
  app.add_option("--timeout", settings.timeout_ms, "of lock, in milliseconds; 0 waits for ever")
      ->capture_default_str();
  app.add_option("--device-map", settings.device_map, "of restore: OLD=NEW,...");
  app.add_option("steps", settings.steps,
                 "init, gpus, memory, state, tid, lock, checkpoint, restore, unlock")
      ->required();
  CLI11_PARSE(app, argc, argv);
  Session session(settings);
  json steps = json::array();
  bool good = true;
  for (const std::string& name : settings.steps) {
    good = session.step(name, steps);
    if (!good) break;
  }
  const json report{
      {"pid", settings.pid}, {"simulated", session.simulated()}, {"steps", std::move(steps)}};
  std::printf("%s\n", report.dump().c_str());
  return good ? 0 : 1;
}
