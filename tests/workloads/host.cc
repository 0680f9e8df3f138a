// Large private memory of the host beside a little on the GPU, all of it verified in each round.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kHostSize = 64U << 20;
constexpr std::uint64_t kOnGpu = 4U << 20;
// Of each round's work on a part of the memory that is written anew: one in so many pieces.
constexpr std::uint64_t kPieces = 64;

std::uint64_t* private_memory(std::uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    programs::die(1, "cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  return static_cast<std::uint64_t*>(memory);
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
  const cuda::CUdeviceptr device = gpu.allocate(kOnGpu);
  const cuda::CUstream stream = gpu.stream();
  const std::uint64_t words = kOnGpu / sizeof(std::uint64_t);
  std::vector<std::uint64_t> back(words);
  while (run.next()) {
    on_all([&](std::uint64_t piece) {
      verify_words(run, "memory of the host", memory + piece * each, 0, each, seeds[piece]);
    });
    fill(run.round() % kPieces);
    const std::uint64_t seed = run.seed(run.round(), kPieces);
    gpu.kernels().fill(stream, device, words, seed);
    gpu.cuda().cuMemcpyDtoHAsync_v2(back.data(), device, kOnGpu, stream);
    gpu.cuda().cuStreamSynchronize(stream);
    verify_words(run, "memory of the GPU", back.data(), 0, words, seed);
    run.finish();
  }
}

}  // namespace stasis::workloads
