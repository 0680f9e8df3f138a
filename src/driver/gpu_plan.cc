#include "driver/gpu_plan.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "base/units.h"

namespace stasis {
namespace {

// Nothing if every process stays where it was.
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

GpuUuid target_of(const GpuUuid& gpu, std::span<const GpuPair> pairs) {
  const auto pair =
      std::find_if(pairs.begin(), pairs.end(), [&](const GpuPair& one) { return one.from == gpu; });
  return pair == pairs.end() ? gpu : pair->to;
}

std::set<GpuUuid> targets_of(std::span<const GpuUse> needed, std::span<const GpuPair> pairs) {
  std::set<GpuUuid> gpus;
  for (const GpuUse& use : needed)
    gpus.insert(target_of(use.gpu, pairs));
  return gpus;
}

namespace {

std::map<GpuUuid, std::uint64_t> needed_on(std::span<const GpuUse> needed,
                                           std::span<const GpuPair> pairs) {
  std::map<GpuUuid, std::uint64_t> sums;
  for (const GpuUse& use : needed)
    sums[target_of(use.gpu, pairs)] += use.bytes;
  return sums;
}

}  // namespace

Result<void> check_gpu_memory(std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                              std::span<const Gpu> gpus) {
  for (const auto& [uuid, bytes] : needed_on(needed, pairs)) {
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

std::map<GpuUuid, std::uint64_t> spare_gpu_memory(std::span<const GpuUse> needed,
                                                  std::span<const GpuPair> pairs,
                                                  std::span<const Gpu> gpus) {
  std::map<GpuUuid, std::uint64_t> out;
  const auto sums = needed_on(needed, pairs);
  for (const Gpu& gpu : gpus) {
    const auto sum = sums.find(gpu.uuid);
    const std::uint64_t taken = gpu.memory_used + (sum == sums.end() ? 0 : sum->second) +
                                kContextBytes + gpu.memory_total / 16;
    if (taken < gpu.memory_total) out[gpu.uuid] = gpu.memory_total - taken;
  }
  return out;
}

}  // namespace stasis
