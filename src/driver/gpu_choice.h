// Which GPUs a job goes on with where the user has not said: others of the same kind, also by
// another UUID or in another order. Pure functions; no driver is asked.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "driver/driver.h"

namespace stasis {

// What a scheduler has given us, as CUDA reads CUDA_VISIBLE_DEVICES: indices or UUIDs, up to the
// first that there is not. All of `gpus` if `visible` is not set.
std::vector<GpuUuid> allotted_gpus(const std::optional<std::string>& visible,
                                   std::span<const Gpu> gpus);

// A bijection of `from`, the GPUs that the processes saw, to `to`, those that are here, as the
// driver demands it. Each GPU of which `needed` says that it was used goes to one of `allotted`
// that is of the same model and size and has so much free, to itself if that is one. The others
// share what is left. If nothing is known of the use, all of `from` count as used, and `allotted`
// for nothing.
// kGpuMismatch: there are not enough of the kind, or not as many GPUs in all; kOutOfGpuMemory: they
// are full. Both say what is needed and what is here.
Result<std::vector<GpuPair>> choose_gpu_map(std::span<const GpuUse> needed,
                                            std::span<const Gpu> from, std::span<const Gpu> to,
                                            std::span<const GpuUuid> allotted);

}  // namespace stasis
