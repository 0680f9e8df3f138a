// The copying itself, by many threads. Each has two buffers and a stream for each, so that the
// thread writes one to the Content, or reads it from there, while the GPU copies the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "direct/content.h"
#include "direct/device.h"
#include "direct/plan.h"
#include "direct/stop.h"

namespace stasis::direct {

// One GPU's part of a copy.
struct DevicePart {
  const Device* device = nullptr;
  cuda::CUdeviceptr base = 0;
  std::vector<Load> loads;
  // If given, one for each load: whether it was copied, also where the copy as a whole has failed.
  std::span<std::atomic<bool>> done = {};
};

struct CopyJob {
  const DeviceCalls* calls = nullptr;
  Direction direction = Direction::kOut;
  std::span<const DevicePart> parts;
  unsigned threads_per_part = 1;
  // Two for each thread, those of thread t of part p at 2 * (p * threads_per_part + t); pinned.
  std::span<const std::span<std::byte>> buffers;
  // Which Content a thread uses; each thread asks once.
  std::function<Content&(unsigned thread)> content;
};

// Whether the GPUs still copy when run_copy() returns, because they did not end in time: then
// neither the buffers nor the mappings may be taken away. Errors are in `stop`.
struct CopyEnd {
  bool still_copying = false;
};
CopyEnd run_copy(const CopyJob& job, Stop& stop);

// Waits until the work submitted to the stream has ended; false if it has not when `stop` says
// stop.
bool wait_for_stream(const DeviceCalls& calls, cuda::CUstream stream, Stop& stop);

}  // namespace stasis::direct
