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
                              bool stops, GpuRoom room);

// Adds to the lenders the agents of those processes that run, if any of the set misses memory of
// another process.
void find_lenders(MemoryState& state, const Environment& env,
                  const std::vector<const Process*>& processes);

// Makes every process of the set run on with its memory: the mover copies it where its content is
// in an image, otherwise the agents do. With `ends_them` the caller ends the processes where the
// image proves damaged: kImageCorrupt then, and otherwise kNotRolledBack with the names of those
// that stand still.
Result<void> bring_back_all(MemoryState& state, bool ends_them);

// The same after a move_out() that was not completed.
Result<void> roll_back(MemoryState& state);

}  // namespace stasis
