// What an operation asks of a mover, and how a MoverProcess is made to have it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/cuda_state.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "direct/mover_process.h"

namespace stasis {

// For a mover's process that computes digests: in the state directory, and as private; empty if
// that cannot be had.
std::string compiled_code_directory();

struct MoverRequest {
  std::vector<GpuUuid> gpus;  // on which it has contexts; none: on each that there is
  bool brings_back = false;   // its ring is the same then, however many GPUs there are
  std::chrono::milliseconds patience{60000};
  bool contexts = true;  // or all that can be made without them, to be asked for once more
};

// Adds to `mover` what it lacks of `needs`, with a share of `ring_bytes` of host memory for each
// GPU; one that is prepared takes further GPUs on as they come. `silence` as in MoverOptions.
// Errors of MoverProcess::prepare().
Result<void> prepare_mover(direct::MoverProcess& mover, const MoverRequest& needs,
                           std::uint64_t ring_bytes, std::chrono::milliseconds silence,
                           const Interrupt& interrupt);

}  // namespace stasis
