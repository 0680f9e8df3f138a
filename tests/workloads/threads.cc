// Host threads that launch at the same time, each on a stream and memory of its own. With --meet
// they wait for each other in the middle of every round, on the GPU, and begin it one after the
// other: a program whose threads drive a GPU each and sum over all of them. On the simulated driver
// only: the real one may run the host functions of a context one after the other.
#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kThreadsSize = 8u << 20;
constexpr int kLaunchesPerRound = 16;
constexpr std::chrono::milliseconds kDelayToMeet{2};

void meet_others(void* meet) { static_cast<std::barrier<>*>(meet)->arrive_and_wait(); }

// One thread's part of every round: a chain of launches, verified one by one.
void work(const Gpu& gpu, const Run& run, std::size_t which, std::uint64_t words,
          const std::atomic<bool>& stop, std::barrier<>& start, std::barrier<>& end,
          std::barrier<>* meet) {
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
    if (meet != nullptr) std::this_thread::sleep_for(which * kDelayToMeet);
    for (std::uint64_t i = 0; i < kLaunchesPerRound; ++i) {
      if (meet != nullptr && i == kLaunchesPerRound / 2)
        gpu.cuda().cuLaunchHostFunc(stream, meet_others, meet);
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
  const std::uint64_t words = run.size_or(kThreadsSize) / count / sizeof(std::uint64_t);
  std::atomic<bool> stop{false};
  std::barrier<> start(static_cast<std::ptrdiff_t>(count + 1));
  std::barrier<> end(static_cast<std::ptrdiff_t>(count + 1));
  std::barrier<> meet(static_cast<std::ptrdiff_t>(count));
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      work(gpu, run, i, words, stop, start, end, run.options().meet ? &meet : nullptr);
    });
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
