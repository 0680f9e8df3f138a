// Host threads that launch at the same time, each on a stream and memory of its own.
#include <atomic>
#include <barrier>
#include <thread>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kDefaultSize = 8u << 20;
constexpr int kLaunchesPerRound = 16;

// One thread's part of every round: a chain of launches, verified one by one.
void work(const Gpu& gpu, const Run& run, std::size_t which, std::uint64_t words,
          const std::atomic<bool>& stop, std::barrier<>& start, std::barrier<>& end) {
  gpu.make_current();
  const cuda::CUstream stream = gpu.stream();
  Checker checker(gpu, kLaunchesPerRound);
  Buffer buffer{"thread " + std::to_string(which), 0, words, run.seed(0, which)};
  buffer.data = gpu.allocate(buffer.bytes());
  gpu.kernels().fill(stream, buffer.data, buffer.words, buffer.seed);
  for (;;) {
    start.arrive_and_wait();
    if (stop) return;
    checker.begin(stream);
    for (std::uint64_t i = 0; i < kLaunchesPerRound; ++i) {
      checker.advance(stream, buffer, run.seed(run.round(), 1000 * i + which));
    }
    checker.verify(stream, run);
    end.arrive_and_wait();
  }
}

}  // namespace

void run_threads(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const std::size_t count = run.options().threads;
  const std::uint64_t words = run.size_or(kDefaultSize) / count / sizeof(std::uint64_t);
  std::atomic<bool> stop{false};
  std::barrier<> start(static_cast<std::ptrdiff_t>(count + 1));
  std::barrier<> end(static_cast<std::ptrdiff_t>(count + 1));
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { work(gpu, run, i, words, stop, start, end); });
  }
  while (run.next()) {
    start.arrive_and_wait();
    end.arrive_and_wait();
    run.finish();
  }
  stop = true;
  start.arrive_and_wait();
}

}  // namespace stasis::workloads
