// Room for what the driver brings back.
#pragma once

#include <span>

#include "base/ids.h"
#include "checkpoint/gpu_room.h"

namespace stasis::direct {

// GpuRoom::find(). What an agent has taken past the driver waits for room of its own: where one of
// `processes` has some, only the GPUs are held, and nothing is looked at.
Result<GpuRoom> find_driver_room(Driver& driver, std::span<const Pid> processes,
                                 std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                                 const GpuRoom::Wait& wait);

}  // namespace stasis::direct
