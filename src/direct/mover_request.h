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

// The directory of compiled code for a mover that computes digests: in the state directory, and as
// private; empty if it cannot be made.
std::string compiled_code_directory();

struct MoverRequest {
  std::vector<GpuUuid> gpus;  // on which the mover has contexts; none: on every GPU
  bool brings_back = false;   // the ring is the same then for any number of GPUs
  std::chrono::milliseconds timeout{60000};
  bool contexts = true;                      // false: only what can be made without them
  std::uint64_t bytes = direct::kAnyAmount;  // that it is to copy, for its ring
};

// Adds to `mover` what it lacks of `needs`, with a share of `ring_bytes` of host memory for each
// GPU; one that is prepared takes further GPUs on as they come. `silence` as in MoverOptions.
// Errors of MoverProcess::prepare().
Result<void> prepare_mover(direct::MoverProcess& mover, const MoverRequest& needs,
                           std::uint64_t ring_bytes, std::chrono::milliseconds silence,
                           const Interrupt& interrupt);

}  // namespace stasis
