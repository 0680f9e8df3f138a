// A tree is brought to a stop, with all its GPU memory away. Private to src/operations.
#pragma once

#include "base/phases.h"
#include "operations/open.h"

namespace stasis {

// Moves the memory of those out that have the agent, then locks and checkpoints the whole tree,
// until no process of it is left that uses the GPU. What
// processes without CUDA have inherited of it is replaced; for a dump a failure of that is one,
// otherwise it is told. The phases are those of GpuMemory::move_out(),
// "lock" and "checkpoint".
Result<void> quiesce(const Environment& env, OpenedTree& opened, const QuiesceOptions& options,
                     Phases& phases);

// Verifies by asking that each CUDA process that still lives is in its wanted state.
Result<void> verify_states(const ProcessTree& tree, CudaState wanted);

}  // namespace stasis
