// Stream-ordered allocation: buffers of the device's pool that live across rounds and are freed and
// allocated anew while others stay.
#include <array>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::size_t kPoolLive = 8;
constexpr std::uint64_t kPoolSize = 32u << 20;

// Ends the program with "skipped" if the driver has no pools.
cuda::CUdeviceptr allocate(const Gpu& gpu, std::uint64_t bytes, cuda::CUstream stream) {
  cuda::CUdeviceptr pointer = 0;
  const cuda::CUresult result = gpu.cuda().cuMemAllocAsync.raw(&pointer, bytes, stream);
  if (result == cuda::CUDA_ERROR_NOT_SUPPORTED || result == cuda::CUDA_ERROR_NOT_FOUND) {
    programs::die_absent("cuMemAllocAsync: " + programs::describe(result));
  }
  if (result != cuda::CUDA_SUCCESS) {
    programs::die(1, "cuMemAllocAsync failed: " + programs::describe(result));
  }
  return pointer;
}

}  // namespace

void run_pool(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const std::uint64_t largest = run.size_or(kPoolSize) / kPoolLive;
  const cuda::CUstream stream = gpu.stream();
  Checker checker(gpu, kPoolLive);
  std::array<Buffer, kPoolLive> live;

  auto renew = [&](std::size_t slot) {
    Buffer& buffer = live[slot];
    if (buffer.data != 0) gpu.cuda().cuMemFreeAsync(buffer.data, stream);
    buffer.words = 1 + run.seed(run.round(), 500 + slot) % (largest / sizeof(std::uint64_t));
    buffer.name =
        "pool buffer " + std::to_string(slot) + " (" + std::to_string(buffer.bytes()) + " bytes)";
    buffer.data = allocate(gpu, buffer.bytes(), stream);
    buffer.seed = run.seed(run.round(), 600 + slot);
    gpu.kernels().fill(stream, buffer.data, buffer.words, buffer.seed);
  };
  for (std::size_t slot = 0; slot < kPoolLive; ++slot)
    renew(slot);
  gpu.cuda().cuStreamSynchronize(stream);

  while (run.next()) {
    checker.begin(stream);
    for (std::size_t slot = 0; slot < kPoolLive; ++slot) {
      checker.advance(stream, live[slot], run.seed(run.round(), slot));
    }
    // Queued behind the check and not waited for: a checkpoint may find them pending.
    renew(run.round() % kPoolLive);
    renew((run.round() * 3 + 1) % kPoolLive);
    checker.verify(stream, run);
    run.finish();
  }
}

}  // namespace stasis::workloads
