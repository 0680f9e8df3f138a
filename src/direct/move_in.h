// The way back: processes whose memory was evicted get it again. Private to src/direct.
#pragma once

#include <cstdint>
#include <vector>

#include "base/phases.h"
#include "checkpoint/gpu_room.h"
#include "direct/memory_state.h"

namespace stasis {

// GpuMemory::move_in().
Result<std::uint64_t> move_in(MemoryState& state, const Environment& env,
                              const std::vector<const Process*>& processes, Phases& phases,
                              IfItFails if_it_fails, GpuRoom room);

// Adds to the lenders the agents of those processes that run, if any of the set misses memory of
// another process.
void find_lenders(MemoryState& state, const Environment& env,
                  const std::vector<const Process*>& processes);

// Makes every process of the set run on with its memory: the mover copies it where its content is
// in an image, otherwise the agents do. kImageCorrupt where the image proves damaged and the caller
// ends the processes, and otherwise kNotRolledBack with the names of those that stand still.
Result<void> bring_back_all(MemoryState& state, IfItFails if_it_fails);

// The same after a move_out() that was not completed.
Result<void> roll_back(MemoryState& state);

}  // namespace stasis
