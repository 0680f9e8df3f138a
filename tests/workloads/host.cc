// Large private memory of the host beside a little on the GPU, all of it verified in each round;
// with --still, more memory on the GPU, of which each round verifies one piece.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kHostSize = 64U << 20;
constexpr std::uint64_t kOnGpu = 4U << 20;
// Each round writes one of so many pieces of the memory, or as many as --anew says.
constexpr std::uint64_t kPieces = 64;

std::uint64_t* private_memory(std::uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    programs::die(1, "cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  return static_cast<std::uint64_t*>(memory);
}

constexpr std::uint64_t kStillBuffer = 256U << 20;

std::vector<Buffer> still_on_gpu(const Run& run, const Gpu& gpu) {
  std::vector<Buffer> buffers;
  for (std::uint64_t left = run.options().still; left >= sizeof(std::uint64_t);) {
    const std::uint64_t words = std::min(left, kStillBuffer) / sizeof(std::uint64_t);
    left -= words * sizeof(std::uint64_t);
    buffers.push_back({"still buffer " + std::to_string(buffers.size()),
                       gpu.allocate(words * sizeof(std::uint64_t)), words,
                       run.seed(0, kPieces + 1 + buffers.size())});
    gpu.kernels().fill(nullptr, buffers.back().data, words, buffers.back().seed);
  }
  return buffers;
}

}  // namespace

void run_host(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const std::uint64_t each = run.size_or(kHostSize) / kPieces / sizeof(std::uint64_t);
  std::uint64_t* const memory = private_memory(each * kPieces * sizeof(std::uint64_t));
  std::vector<std::uint64_t> seeds(kPieces);
  const auto fill = [&](std::uint64_t piece) {
    seeds[piece] = run.seed(run.round(), piece);
    for (std::uint64_t i = 0; i < each; ++i)
      memory[piece * each + i] = word(i, seeds[piece]);
  };
  const auto on_all = [&](const auto& work) {
    std::vector<std::jthread> threads;
    for (std::uint32_t t = 0; t < run.options().threads; ++t) {
      threads.emplace_back([&, t] {
        for (std::uint64_t piece = t; piece < kPieces; piece += run.options().threads)
          work(piece);
      });
    }
  };
  on_all(fill);
  std::vector<Buffer> still = still_on_gpu(run, gpu);
  Checker checker(gpu, 1);
  const cuda::CUdeviceptr device = gpu.allocate(kOnGpu);
  const cuda::CUstream stream = gpu.stream();
  const std::uint64_t words = kOnGpu / sizeof(std::uint64_t);
  std::vector<std::uint64_t> back(words);
  while (run.next()) {
    on_all([&](std::uint64_t piece) {
      verify_words(run, "memory of the host", memory + piece * each, 0, each, seeds[piece]);
    });
    for (std::uint64_t i = 0; i < run.options().anew; ++i)
      fill((run.round() * run.options().anew + i) % kPieces);
    if (!still.empty()) {
      Buffer& buffer = still[run.round() % still.size()];
      checker.begin(nullptr);
      checker.advance(nullptr, buffer, buffer.seed);
      checker.verify(nullptr, run);
    }
    const std::uint64_t seed = run.seed(run.round(), kPieces);
    gpu.kernels().fill(stream, device, words, seed);
    gpu.cuda().cuMemcpyDtoHAsync_v2(back.data(), device, kOnGpu, stream);
    gpu.cuda().cuStreamSynchronize(stream);
    verify_words(run, "memory of the GPU", back.data(), 0, words, seed);
    run.finish();
  }
}

}  // namespace stasis::workloads
