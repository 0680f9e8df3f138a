// Digests of device memory, computed where it is, and what a copy can leave out by them.
//
// A GPU reads its memory some fifty times as fast as the bus carries it away. So what an image has
// already, by its digest, need not leave the GPU at all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "direct/content.h"
#include "direct/device.h"
#include "direct/plan.h"
#include "direct/stop.h"

namespace stasis::direct {

// The kernel, in one GPU's context. Lasts as long as the Device.
class GpuDigest {
 public:
  // Also tries it on a pattern. kNotSupported where the driver cannot compile it or the GPU does
  // not know it, kOutOfGpuMemory; kInternal where it fails or the digest is wrong: then that
  // context is good for nothing.
  static Result<GpuDigest> load(const DeviceCalls& calls, const Device& device, Stop& stop);

  // Queues the accumulators of `chunks` chunks that lie one behind the other, to `lanes`, 64 bytes
  // for each. `chunk_bytes` is a multiple of 1024.
  cuda::CUresult queue(cuda::CUdeviceptr data, std::uint64_t chunks, std::uint64_t chunk_bytes,
                       cuda::CUdeviceptr lanes, cuda::CUstream stream) const;

 private:
  GpuDigest(const DeviceCalls& calls, cuda::CUfunction function, DeviceMemory keys)
      : calls_(&calls), function_(function), keys_(std::move(keys)) {}
  Result<void> try_out(const Device& device, Stop& stop) const;

  const DeviceCalls* calls_;
  cuda::CUfunction function_;
  DeviceMemory keys_;
};

// One GPU's part of a copy out, before it begins.
struct DigestPart {
  const Device* device = nullptr;
  const GpuDigest* digest = nullptr;
  cuda::CUdeviceptr base = 0;
  std::span<const Stretch> stretches;
  std::span<const std::span<std::byte>> buffers;  // pinned, all of the same size
  cuda::CUstream stream = nullptr;
};

struct LeftOut {
  std::vector<std::vector<Stretch>> left;  // of each part: what is still to be copied
  bool still_running = false;              // a GPU has not ended in time
};

// Asks `content` about every whole chunk of `chunk_bytes`, from `threads` threads, each of which
// talks to its own. A GPU that cannot take part has all of its memory copied. Errors of the
// content, and of a GPU at work, are in `stop`.
LeftOut leave_out(const DeviceCalls& calls, std::span<const DigestPart> parts,
                  std::uint64_t chunk_bytes, unsigned threads,
                  const std::function<Content&(unsigned)>& content, Stop& stop);

// Chunks of a mapped range that lie one behind the other in the content, too.
struct ChunkRun {
  std::uint64_t mapped = 0;
  std::uint64_t content = 0;
  std::uint64_t count = 0;
  bool operator==(const ChunkRun&) const = default;
};
// All whole ones, by where they are in the content.
std::vector<ChunkRun> chunk_runs(std::span<const Stretch> stretches, std::uint64_t chunk_bytes);
// The stretches without those chunks that are `gone`, counted over all runs.
std::vector<Stretch> without_chunks(std::span<const Stretch> stretches,
                                    std::span<const ChunkRun> runs, std::uint64_t chunk_bytes,
                                    std::span<const char> gone);

}  // namespace stasis::direct
