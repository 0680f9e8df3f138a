// Managed (UVM) memory, which the driver cannot checkpoint: small pieces and large ones, written by
// the GPU and by the CPU, with a piece that comes and goes, and advice. A thread of the CPU counts
// in it without ever calling the driver: what it has written last must be there at each moment.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

using cuda::CUdeviceptr;

constexpr std::uint64_t kSize = 4u << 20;

class Managed {
 public:
  explicit Managed(Run& run)
      : run_(run), gpu_(Gpu::primary(initialised_driver(run.options()), 0)) {}

  void work() {
    Buffer buffer = allocated("managed memory", run_.size_or(kSize), 0);
    std::vector<Buffer> others;
    // In this order, so that no two of a size are neighbours.
    for (const std::uint64_t bytes : {4096u, 3u << 20, 100000u, 4096u, 1u << 20})
      others.push_back(allocated("other managed memory", bytes, others.size() + 1));
    // Only its end is ever touched.
    const std::uint64_t large = 40u << 20;
    others.push_back(
        filled("the end of managed memory", allocate(large) + large - 65536, 65536, 70));
    Buffer fleeting = allocated("fleeting managed memory", 65536, 77);
    advise(others[1]);
    bring(buffer);
    // At the end of a large piece, which is copied last.
    const std::uint64_t behind = 24u << 20;
    auto* counter = reinterpret_cast<std::atomic<std::uint64_t>*>(allocate(behind + 4096) + behind);
    std::thread thread([&] { count(*counter); });
    thread.detach();
    const auto* on_cpu = reinterpret_cast<const std::uint64_t*>(buffer.data);
    Checker checker(gpu_, 1 + others.size());
    while (run_.next()) {
      checker.begin(nullptr);
      checker.advance(nullptr, buffer, run_.seed(run_.round()));
      for (std::size_t i = 0; i < others.size(); ++i)
        checker.advance(nullptr, others[i], run_.seed(run_.round(), i + 1));
      checker.verify(nullptr, run_);
      verify_words(run_, buffer.name, on_cpu, 0, buffer.words, buffer.seed);
      verify_advice(others[1]);
      verify_brought(buffer);
      auto* words = reinterpret_cast<std::uint64_t*>(fleeting.data);
      verify_words(run_, fleeting.name, words, 0, fleeting.words, fleeting.seed);
      gpu_.cuda().cuMemFree_v2(fleeting.data);
      fleeting = allocated(fleeting.name, 65536, run_.round() + 1000);
      if (wrong_) run_.mismatch("the thread's count in managed memory is not what it has written");
      run_.finish();
    }
  }

 private:
  CUdeviceptr allocate(std::uint64_t bytes) const {
    CUdeviceptr data = 0;
    const auto result = gpu_.cuda().cuMemAllocManaged.raw(&data, bytes, cuda::CU_MEM_ATTACH_GLOBAL);
    if (result == cuda::CUDA_ERROR_NOT_SUPPORTED || result == cuda::CUDA_ERROR_NOT_FOUND)
      programs::die_absent("no managed memory on this driver: " + programs::describe(result));
    if (result != cuda::CUDA_SUCCESS)
      programs::die(1, "cuMemAllocManaged failed: " + programs::describe(result));
    return data;
  }

  Buffer allocated(const std::string& name, std::uint64_t bytes, std::uint64_t which) const {
    return filled(name, allocate(bytes), bytes, which);
  }
  Buffer filled(const std::string& name, CUdeviceptr data, std::uint64_t bytes,
                std::uint64_t which) const {
    Buffer buffer{name, data, bytes / sizeof(std::uint64_t), run_.seed(0, which)};
    gpu_.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
    gpu_.cuda().cuCtxSynchronize();
    return buffer;
  }

  void advise(const Buffer& buffer) const {
    gpu_.cuda().cuMemAdvise(buffer.data, buffer.bytes(), cuda::CU_MEM_ADVISE_SET_READ_MOSTLY, 0);
    gpu_.cuda().cuMemAdvise(buffer.data, buffer.bytes(), cuda::CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                            cuda::kDeviceCpu);
  }

  // A large one: where pieces are smaller than 2 MiB, the driver forgets it when their neighbours
  // come and go (580.159.04).
  void bring(const Buffer& buffer) const {
    gpu_.cuda().cuMemPrefetchAsync(buffer.data, buffer.bytes(), 0, nullptr);
  }
  void verify_brought(const Buffer& buffer) const {
    int where = -7;
    gpu_.cuda().cuMemRangeGetAttribute(&where, sizeof where,
                                       cuda::CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
                                       buffer.data, buffer.bytes());
    if (where != 0) run_.mismatch("managed memory is not where it was brought");
  }

  void verify_advice(const Buffer& buffer) const {
    int read_mostly = 0;
    int preferred = 0;
    gpu_.cuda().cuMemRangeGetAttribute(&read_mostly, sizeof read_mostly,
                                       cuda::CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, buffer.data,
                                       buffer.bytes());
    gpu_.cuda().cuMemRangeGetAttribute(&preferred, sizeof preferred,
                                       cuda::CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, buffer.data,
                                       buffer.bytes());
    if (read_mostly != 1 || preferred != cuda::kDeviceCpu)
      run_.mismatch("the advice for managed memory is not what was given");
  }

  void count(std::atomic<std::uint64_t>& shared) {
    for (std::uint64_t own = 0;; ++own) {
      if (shared.load(std::memory_order_relaxed) != own) wrong_ = true;
      shared.store(own + 1, std::memory_order_relaxed);
      // Ten thousand times a second it leaves the processor to others: tests run side by side.
      if (own % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  Run& run_;
  const Gpu gpu_;
  std::atomic<bool> wrong_{false};
};

}  // namespace

void run_managed(Run& run) { Managed(run).work(); }

}  // namespace stasis::workloads
