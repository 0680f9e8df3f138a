// The two kinds that do nothing: with a context, and without CUDA.
#include "tests/workloads/gpu.h"

namespace stasis::workloads {

void run_idle(Run& run) {
  [[maybe_unused]] const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  // No call at all: those that pass the driver's lock, cuMemGetInfo among them, end a process that
  // makes one while it is being checkpointed (580.159.04).
  while (run.next())
    run.finish();
}

// Verified all the same: CRIU moves this memory too.
void run_none(Run& run) {
  constexpr std::uint64_t kWords = 1u << 16;
  std::vector<std::uint64_t> memory(kWords);
  std::uint64_t seed = run.seed(0);
  for (std::uint64_t i = 0; i < kWords; ++i)
    memory[i] = word(i, seed);
  while (run.next()) {
    verify_words(run, "host memory", memory.data(), 0, kWords, seed);
    seed = run.seed(run.round());
    for (std::uint64_t i = 0; i < kWords; ++i)
      memory[i] = word(i, seed);
    run.finish();
  }
}

}  // namespace stasis::workloads
