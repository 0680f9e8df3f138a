// Managed (UVM) memory, which the driver cannot checkpoint: for tests of how that is refused. Small
// on purpose, and it must run on unharmed after the refusal.
#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {
constexpr std::uint64_t kSize = 16u << 20;
}

void run_managed(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  Buffer buffer{"managed memory", 0, kSize / sizeof(std::uint64_t), run.seed(0)};
  const cuda::CUresult result =
      gpu.cuda().cuMemAllocManaged.raw(&buffer.data, buffer.bytes(), cuda::CU_MEM_ATTACH_GLOBAL);
  if (result == cuda::CUDA_ERROR_NOT_SUPPORTED || result == cuda::CUDA_ERROR_NOT_FOUND) {
    programs::die_absent("no managed memory on this driver: " + programs::describe(result));
  }
  if (result != cuda::CUDA_SUCCESS) {
    programs::die(1, "cuMemAllocManaged failed: " + programs::describe(result));
  }
  const auto* on_cpu = reinterpret_cast<const std::uint64_t*>(buffer.data);
  gpu.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
  Checker checker(gpu, 1);
  while (run.next()) {
    checker.begin(nullptr);
    checker.advance(nullptr, buffer, run.seed(run.round()));
    checker.verify(nullptr, run);
    verify_words(run, "managed memory, read by the CPU", on_cpu, 0, buffer.words, buffer.seed);
    run.finish();
  }
}

}  // namespace stasis::workloads
