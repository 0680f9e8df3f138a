// Host threads that ask the driver all the time, as NCCL's watchdog and many a scheduler do: these
// calls pass the driver's lock, and end the program when one is made while the GPU is away.
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kPollSize = 16u << 20;

// Makes one call again and again until told to stop, with --own-us of other work in between.
template <class Call>
std::jthread ask(const Gpu& gpu, const Run& run, const std::atomic<bool>& stop,
                 std::atomic<std::uint64_t>& count, Call call) {
  return std::jthread([&gpu, &run, &stop, &count, call] {
    const std::chrono::microseconds own(run.options().own_us);
    gpu.make_current();
    while (!stop) {
      call();
      count.fetch_add(1, std::memory_order_relaxed);
      const auto start = std::chrono::steady_clock::now();
      while (own.count() > 0 && std::chrono::steady_clock::now() - start < own) {
      }
    }
  });
}

}  // namespace

void run_poll(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const programs::CudaApi& cuda = gpu.cuda();
  const cuda::CUstream stream = gpu.stream();
  Checker checker(gpu, 1);
  Buffer buffer{"memory", 0, run.size_or(kPollSize) / sizeof(std::uint64_t), run.seed(0)};
  buffer.data = gpu.allocate(buffer.bytes());
  gpu.kernels().fill(stream, buffer.data, buffer.words, buffer.seed);
  cuda::CUevent event = nullptr;
  cuda.cuEventCreate(&event, 0);
  cuda.cuEventRecord(event, stream);
  std::atomic<bool> stop{false};
  std::array<std::atomic<std::uint64_t>, 4> counts{};
  // "Not ready" is an answer, everything else but success is not.
  const auto answered = [&run](const char* call, cuda::CUresult result) {
    if (result == cuda::CUDA_SUCCESS || result == cuda::CUDA_ERROR_NOT_READY) return;
    run.mismatch(std::string(call) + " answered " + std::to_string(result));
  };
  std::array<std::jthread, 4> threads{
      ask(gpu, run, stop, counts[0],
          [&] { answered("cuEventQuery", cuda.cuEventQuery.raw(event)); }),
      ask(gpu, run, stop, counts[1],
          [&] { answered("cuStreamQuery", cuda.cuStreamQuery.raw(stream)); }),
      ask(gpu, run, stop, counts[2],
          [&] { answered("cuCtxSynchronize", cuda.cuCtxSynchronize.raw()); }),
      ask(gpu, run, stop, counts[3], [&] {
        std::size_t free = 0;
        std::size_t total = 0;
        answered("cuMemGetInfo", cuda.cuMemGetInfo_v2.raw(&free, &total));
      })};
  while (run.next()) {
    checker.begin(stream);
    checker.advance(stream, buffer, run.seed(run.round()));
    cuda.cuEventRecord(event, stream);
    checker.verify(stream, run);
    std::array<std::uint64_t, 4> before{};
    for (std::size_t i = 0; i < counts.size(); ++i)
      before[i] = counts[i];
    // A round is also some answers to every question.
    for (std::size_t i = 0; i < counts.size(); ++i) {
      while (counts[i] == before[i] && !Run::stop_requested())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    run.finish();
  }
  stop = true;
}

}  // namespace stasis::workloads
