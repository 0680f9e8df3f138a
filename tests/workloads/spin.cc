// Work that is hard to lock: one long kernel after the other, or threads that never stop launching.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint32_t kDefaultBusyMs = 2000;
constexpr std::uint64_t kFirstNs = 1'000'000;
constexpr std::uint64_t kStarveWords = 1u << 15;

// Launches without pause until told to stop, and says how many launches were verified.
void hammer(const Gpu& gpu, const Run& run, std::size_t which, const std::atomic<bool>& stop,
            std::atomic<std::uint64_t>& launches) {
  gpu.make_current();
  const cuda::CUstream stream = gpu.stream();
  Checker checker(gpu, 1);
  Buffer buffer{"thread " + std::to_string(which), 0, kStarveWords, run.seed(0, which)};
  buffer.data = gpu.allocate(buffer.bytes());
  gpu.kernels().fill(stream, buffer.data, buffer.words, buffer.seed);
  for (std::uint64_t i = 1; !stop; ++i) {
    checker.begin(stream);
    checker.advance(stream, buffer, run.seed(i, 1000 + which));
    checker.verify(stream, run);
    launches.fetch_add(1);
  }
}

}  // namespace

void run_spin(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  Checker checker(gpu, 1);
  Buffer buffer{"still", 0, run.size_or(0) / sizeof(std::uint64_t), run.seed(0, 0)};
  if (buffer.words > 0) {
    buffer.data = gpu.allocate(buffer.bytes());
    gpu.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
  }
  const cuda::CUdeviceptr done = gpu.allocate(sizeof(std::uint64_t));
  gpu.cuda().cuMemsetD8_v2(done, 0, sizeof(std::uint64_t));
  const std::uint64_t ns = std::uint64_t{run.busy_ms_or(kDefaultBusyMs)} * 1'000'000;
  // The first one is short, and the next one is in flight before a round is told: who has seen a
  // round knows that a long one has just begun.
  gpu.kernels().spin(nullptr, std::min(ns, kFirstNs), done);
  while (run.next()) {
    gpu.cuda().cuStreamSynchronize(nullptr);
    if (buffer.words > 0) {
      checker.begin(nullptr);
      checker.advance(nullptr, buffer, run.seed(run.round(), 1));
      checker.verify(nullptr, run);
    }
    std::uint64_t count = 0;
    gpu.cuda().cuMemcpyDtoH_v2(&count, done, sizeof count);
    if (count != run.round()) {
      run.mismatch("the kernel ran " + std::to_string(count) + " times instead of " +
                   std::to_string(run.round()));
    }
    gpu.kernels().spin(nullptr, ns, done);
    run.finish();
  }
}

namespace {

// A long kernel in each round, in a stream, or in a context besides, that was made for it.
void spin_anew(Run& run, bool in_own_context) {
  const programs::CudaApi& cuda = initialised_driver(run.options());
  const Gpu first = Gpu::primary(cuda, 0);
  const std::uint64_t ns = std::uint64_t{run.busy_ms_or(kDefaultBusyMs)} * 1'000'000;
  while (run.next()) {
    const Gpu gpu = in_own_context ? Gpu::created(cuda, 0) : first;
    const cuda::CUstream stream = gpu.stream();
    const cuda::CUdeviceptr done = gpu.allocate(sizeof(std::uint64_t));
    cuda.cuMemsetD8_v2(done, 0, sizeof(std::uint64_t));
    gpu.kernels().spin(stream, ns, done);
    cuda.cuStreamSynchronize(stream);
    std::uint64_t count = 0;
    cuda.cuMemcpyDtoH_v2(&count, done, sizeof count);
    if (count != 1) run.mismatch("the kernel ran " + std::to_string(count) + " times");
    run.finish();
  }
}

}  // namespace

void run_spin_stream(Run& run) { spin_anew(run, false); }
void run_spin_context(Run& run) { spin_anew(run, true); }

void run_starve(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const std::size_t count = run.options().threads;
  std::atomic<bool> stop{false};
  std::vector<std::atomic<std::uint64_t>> launches(count);
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { hammer(gpu, run, i, stop, launches[i]); });
  }
  // A round is a launch more of every thread.
  std::vector<std::uint64_t> before(count, 0);
  while (run.next()) {
    for (std::size_t i = 0; i < count; ++i) {
      while (launches[i] == before[i] && !Run::stop_requested()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      before[i] = launches[i];
    }
    run.finish();
  }
  stop = true;
}

}  // namespace stasis::workloads
