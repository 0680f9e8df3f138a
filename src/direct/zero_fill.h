// Zeros that are known need not come over the bus: a GPU writes its memory some fifty times as
// fast.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "direct/content.h"
#include "direct/device.h"
#include "direct/plan.h"
#include "direct/stop.h"

namespace stasis::direct {

// One GPU's part of a copy in, before it begins.
struct ZeroPart {
  const Device* device = nullptr;
  cuda::CUdeviceptr base = 0;
  std::span<const Stretch> stretches;
  cuda::CUstream stream = nullptr;
};

// Asks `content` about every whole chunk of `chunk_bytes`, from as many threads as there are
// `buffers`, each of which talks to its own, and queues the zeros to the parts' streams: the caller
// waits for these. Returns of each part what is still to be copied. Errors are in `stop`.
std::vector<std::vector<Stretch>> fill_zeros(const DeviceCalls& calls,
                                             std::span<const ZeroPart> parts,
                                             std::uint64_t chunk_bytes,
                                             std::span<const std::span<std::byte>> buffers,
                                             const std::function<Content&(unsigned)>& content,
                                             Stop& stop);

}  // namespace stasis::direct
