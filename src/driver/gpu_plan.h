// Where GPU memory goes when a process is brought back, and whether it fits there.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "driver/driver.h"
#include "driver/gpu_choice.h"
#include "driver/gpu_map.h"

namespace stasis {

// What a CUDA context takes on an H100 (driver 580: 520-620 MB) counts as GPU memory in use, and is
// not in the image.
inline constexpr std::uint64_t kContextBytes = 640ULL << 20;

// Where what was on `gpu` goes: there, if no pair says otherwise.
GpuUuid target_of(const GpuUuid& gpu, std::span<const GpuPair> pairs);

// Where these come back.
std::set<GpuUuid> targets_of(std::span<const GpuUse> needed, std::span<const GpuPair> pairs);

// The complete map for the driver, empty if everything stays where it was. `from` are the GPUs the
// processes were on.
Result<std::vector<GpuPair>> plan_gpu_map(Driver& driver, std::span<const GpuMapEntry> entries,
                                          std::span<const Gpu> from, std::span<const Gpu> to);

// The same by choose_gpu_map().
Result<std::vector<GpuPair>> plan_chosen_gpus(Driver& driver, std::span<const GpuUse> needed,
                                              std::span<const Gpu> from, std::span<const Gpu> to,
                                              std::span<const GpuUuid> allotted);

// kOutOfGpuMemory, with the figures, if what was used on the old GPUs does not fit into the free
// memory of the new ones.
Result<void> check_gpu_memory(std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                              std::span<const Gpu> gpus);

// Bytes of each new GPU that are left when all of that was brought back there, less a context;
// nothing for GPUs that have none. A sixteenth of each GPU is left to others, and to what the
// driver needs besides.
std::map<GpuUuid, std::uint64_t> spare_gpu_memory(std::span<const GpuUse> needed,
                                                  std::span<const GpuPair> pairs,
                                                  std::span<const Gpu> gpus);

}  // namespace stasis
