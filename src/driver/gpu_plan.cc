#include "driver/gpu_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/units.h"

namespace stasis {
namespace {

// Nothing if everybody stays where he was.
Result<std::vector<GpuPair>> as_driver_wants(const Driver& driver,
                                             Result<std::vector<GpuPair>> pairs) {
  if (!pairs) return pairs;
  const bool identity =
      std::all_of(pairs->begin(), pairs->end(), [](const GpuPair& p) { return p.from == p.to; });
  if (identity) return std::vector<GpuPair>();
  if (!driver.info().has_device_map) {
    return fail(ErrorCode::kDeviceMapUnsupported,
                fmt::format("this driver ({}) cannot move a process to other GPUs",
                            driver.info().driver_version),
                "install driver 580 or newer, or restore on the GPUs the process was on");
  }
  return pairs;
}

}  // namespace

Result<std::vector<GpuPair>> plan_gpu_map(Driver& driver, std::span<const GpuMapEntry> entries,
                                          std::span<const Gpu> from, std::span<const Gpu> to) {
  return as_driver_wants(driver, complete_gpu_map(entries, from, to));
}

Result<std::vector<GpuPair>> plan_chosen_gpus(Driver& driver, std::span<const GpuUse> needed,
                                              std::span<const Gpu> from, std::span<const Gpu> to,
                                              std::span<const GpuUuid> allotted) {
  return as_driver_wants(driver, choose_gpu_map(needed, from, to, allotted));
}

Result<void> check_gpu_memory(std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                              std::span<const Gpu> gpus) {
  std::map<GpuUuid, std::uint64_t> sums;
  for (const GpuUse& use : needed) {
    GpuUuid target = use.gpu;
    for (const GpuPair& pair : pairs) {
      if (pair.from == use.gpu) target = pair.to;
    }
    sums[target] += use.bytes;
  }
  for (const auto& [uuid, bytes] : sums) {
    // clang++ 14 captures no structured bindings by reference.
    const auto gpu = std::find_if(gpus.begin(), gpus.end(),
                                  [&uuid = uuid](const Gpu& g) { return g.uuid == uuid; });
    if (gpu == gpus.end()) {
      return fail(ErrorCode::kGpuMismatch,
                  fmt::format("{} is not in this machine", uuid.to_string()),
                  "name the GPU to use instead with --device-map OLD=NEW");
    }
    const std::uint64_t free = gpu->memory_total - std::min(gpu->memory_total, gpu->memory_used);
    if (bytes > free) {
      return fail(ErrorCode::kOutOfGpuMemory,
                  fmt::format("{} ({}) has {} of memory free, and {} is needed", uuid.to_string(),
                              gpu->name, format_bytes(free), format_bytes(bytes)),
                  "free GPU memory, or choose another GPU with --device-map OLD=NEW");
    }
  }
  return {};
}

}  // namespace stasis
