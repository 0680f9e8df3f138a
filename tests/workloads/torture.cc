// As much device memory as is asked for, in hundreds of allocations of all sizes, all of it checked
// and changed in each round.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kTortureSize = 512u << 20;
constexpr std::uint64_t kTortureSmallest = 4096;
constexpr std::uint64_t kLargestAtLeast = 8u << 20;

// Every order of magnitude as often as any other, so that there are many small ones and most of the
// memory lies in large ones; sizes that are a multiple of nothing but words.
std::uint64_t some_size(std::uint64_t random, std::uint64_t largest) {
  const double part = static_cast<double>(random >> 11) * 0x1p-53;
  const double size =
      static_cast<double>(kTortureSmallest) *
      std::pow(static_cast<double>(largest) / static_cast<double>(kTortureSmallest), part);
  return static_cast<std::uint64_t>(size) / sizeof(std::uint64_t) * sizeof(std::uint64_t);
}

}  // namespace

void run_torture(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const std::uint64_t size = run.size_or(kTortureSize);
  const std::uint64_t largest = std::max(size / 64, kLargestAtLeast);
  // So many in a row have the same size and content. An image holds that content once.
  const std::uint64_t copies = run.options().copies;
  std::vector<Buffer> buffers;
  for (std::uint64_t left = size; left >= kTortureSmallest;) {
    const std::uint64_t kind = buffers.size() / copies;
    const std::uint64_t bytes = std::min(some_size(run.seed(0, kind), largest),
                                         left / sizeof(std::uint64_t) * sizeof(std::uint64_t));
    const std::string name =
        "buffer " + std::to_string(buffers.size()) + " (" + std::to_string(bytes) + " bytes)";
    buffers.push_back(
        {name, gpu.allocate(bytes), bytes / sizeof(std::uint64_t), run.seed(1, kind)});
    gpu.kernels().fill(nullptr, buffers.back().data, buffers.back().words, buffers.back().seed);
    left -= bytes;
  }
  std::printf("%zu allocations\n", buffers.size());
  std::fflush(stdout);
  Checker checker(gpu, buffers.size());
  while (run.next()) {
    checker.begin(nullptr);
    for (std::size_t i = 0; i < buffers.size(); ++i)
      checker.advance(nullptr, buffers[i], run.seed(run.round() + 1, i / copies));
    checker.verify(nullptr, run);
    run.finish();
  }
}

}  // namespace stasis::workloads
