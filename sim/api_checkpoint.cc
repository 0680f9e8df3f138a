// The six checkpoint functions. They act on another process, need no cuInit (but for a restore
// without persistence mode) and never wait for this process's own gate.
#include <algorithm>
#include <cstring>
#include <memory>

#include "sim/api.h"
#include "sim/checkpoint_client.h"
#include "sim/driver.h"

using namespace stasis::cuda;  // NOLINT: this file is the driver's interface
using namespace stasis::sim;   // NOLINT: and it is made of the simulation's parts

namespace {

bool all_zero(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  return std::all_of(bytes, bytes + size, [](char c) { return c == 0; });
}

// What every call begins with.
template <class F>
CUresult with_config(F&& body) {
  Config config;
  std::string error;
  if (!load(config, error)) return CUDA_ERROR_INVALID_SOURCE;
  if (!config.has_checkpoint()) return CUDA_ERROR_NOT_SUPPORTED;
  return body(config);
}

CUresult ask(int pid, Action action, std::uint32_t timeout_ms = 0) {
  auto request = std::make_unique<Request>();
  request->action = action;
  request->timeout_ms = timeout_ms;
  return ask_target(pid, *request);
}

void describe_machine(const Config& config, Request& request) {
  request.gpu_count = static_cast<std::uint32_t>(config.gpus.size());
  for (std::size_t i = 0; i < config.gpus.size(); ++i) {
    auto& wire = request.gpus[i];
    wire.uuid = config.gpus[i].uuid;
    wire.capacity = config.gpus[i].capacity;
    wire.pci_bus = config.gpus[i].pci_bus;
    config.gpus[i].name.copy(wire.name, sizeof wire.name - 1);
  }
  config.dir.copy(request.dir, sizeof request.dir - 1);
}

}  // namespace

CUresult cuCheckpointProcessGetState(int pid, CUprocessState* state) {
  if (!state) return CUDA_ERROR_INVALID_VALUE;
  return with_config([&](const Config&) { return target_state(pid, *state); });
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
  if (!tid) return CUDA_ERROR_INVALID_VALUE;
  return with_config([&](const Config&) { return target_restore_thread(pid, *tid); });
}

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args) {
  return with_config([&](const Config&) -> CUresult {
    if (args && (args->reserved0 || !all_zero(args->reserved1, sizeof args->reserved1))) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return ask(pid, Action::kLock, args ? args->timeoutMs : 0);
  });
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs* args) {
  return with_config([&](const Config&) -> CUresult {
    if (args && !all_zero(args, sizeof *args)) return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, Action::kCheckpoint);
  });
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args) {
  return with_config([&](const Config& config) -> CUresult {
    auto request = std::make_unique<Request>();
    request->action = Action::kRestore;
    if (args) {
      if (!all_zero(args->reserved, sizeof args->reserved) || args->reserved1) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      const bool map = args->gpuPairsCount > 0;
      if (map && (!args->gpuPairs || args->gpuPairsCount > kMaxGpus || !config.has_gpu_pairs())) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      request->pair_count = args->gpuPairsCount;
      if (map) std::copy_n(args->gpuPairs, args->gpuPairsCount, request->pairs);
    }
    if (!config.persistence && !live_driver()) return CUDA_ERROR_NOT_PERMITTED;
    describe_machine(config, *request);
    return ask_target(pid, *request);
  });
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs* args) {
  return with_config([&](const Config&) -> CUresult {
    if (args && !all_zero(args, sizeof *args)) return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, Action::kUnlock);
  });
}
