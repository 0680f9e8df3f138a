// Host threads that allocate and free device memory all the time, each without regard to the others
// and to the rounds: a round has passed when every thread has verified all that it holds once more.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <memory>
#include <thread>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLive = 6;            // buffers of each thread
constexpr std::size_t kMapped = kLive - 1;  // this one it maps itself
constexpr std::size_t kRenewedPerPass = 3;  // of them
constexpr std::uint64_t kSmallest = 4096;   // bytes; those below 2 MiB stay with the driver
constexpr std::uint64_t kDefaultSize = 96u << 20;

// One thread's memory, and what it does with it.
class Tenant {
 public:
  Tenant(const Gpu& gpu, const Run& run, std::size_t number, std::uint64_t largest)
      : gpu_(gpu), run_(run), number_(number), largest_(std::max(largest, 2 * kSmallest)) {
    prop_.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop_.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal()};
    gpu.cuda().cuMemGetAllocationGranularity(&granularity_, &prop_,
                                             cuda::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  }

  std::uint64_t passes() const { return passes_.load(); }

  // `rest`: how many times as long as a pass has taken it does nothing.
  void work(const std::atomic<bool>& stop, double rest) {
    constexpr std::chrono::milliseconds kLongestRest{100};
    gpu_.make_current();
    const cuda::CUstream stream = gpu_.stream();
    Checker checker(gpu_, kLive);
    for (std::size_t slot = 0; slot < kLive; ++slot)
      fill(slot, stream);
    for (std::uint64_t pass = 1; !stop; ++pass) {
      const auto begun = Clock::now();
      checker.begin(stream);
      for (std::size_t slot = 0; slot < kLive; ++slot)
        checker.advance(stream, live_[slot], seed(pass, slot));
      checker.verify(stream, run_);
      for (std::size_t i = 0; i < kRenewedPerPass; ++i) {
        const std::size_t slot = seed(pass, 100 + i) % kLive;
        release(slot);
        fill(slot, stream);
      }
      passes_.store(pass);
      if (rest > 0)
        std::this_thread::sleep_for(
            std::min<std::chrono::duration<double>>(rest * (Clock::now() - begun), kLongestRest));
    }
  }

 private:
  std::uint64_t seed(std::uint64_t pass, std::uint64_t which) const {
    return run_.seed(pass, 1000 * (number_ + 1) + which);
  }

  // Small sizes come as often as large ones.
  std::uint64_t size_of_next() {
    const std::uint64_t random = seed(++allocations_, 500);
    const auto doublings = static_cast<std::uint64_t>(std::bit_width(largest_ / kSmallest));
    const std::uint64_t limit = std::min(kSmallest << (random >> 40) % (doublings + 1), largest_);
    return kSmallest + random % limit / sizeof(std::uint64_t) * sizeof(std::uint64_t);
  }

  void fill(std::size_t slot, cuda::CUstream stream) {
    Buffer& buffer = live_[slot];
    std::uint64_t bytes = size_of_next();
    if (slot == kMapped) {
      bytes = (bytes + granularity_ - 1) / granularity_ * granularity_;
      map(buffer.data, bytes);
    } else {
      buffer.data = gpu_.allocate(bytes);
    }
    buffer.words = bytes / sizeof(std::uint64_t);
    buffer.name = "buffer " + std::to_string(slot) + " of thread " + std::to_string(number_) +
                  " (" + std::to_string(bytes) + " bytes)";
    buffer.seed = seed(allocations_, 600);
    gpu_.kernels().fill(stream, buffer.data, buffer.words, buffer.seed);
  }

  // What was launched has the memory still to fill: to free it waits for that.
  void release(std::size_t slot) {
    Buffer& buffer = live_[slot];
    const auto& cuda = gpu_.cuda();
    if (slot != kMapped) {
      cuda.cuMemFree_v2(buffer.data);
      return;
    }
    cuda.cuCtxSynchronize();
    cuda.cuMemUnmap(buffer.data, buffer.bytes());
    cuda.cuMemRelease(handle_);
    cuda.cuMemAddressFree(buffer.data, buffer.bytes());
  }

  void map(cuda::CUdeviceptr& address, std::uint64_t bytes) {
    const auto& cuda = gpu_.cuda();
    const cuda::CUmemAccessDesc access{prop_.location, cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    cuda.cuMemAddressReserve(&address, bytes, 0, 0, 0);
    cuda.cuMemCreate(&handle_, bytes, &prop_, 0);
    cuda.cuMemMap(address, bytes, 0, handle_, 0);
    cuda.cuMemSetAccess(address, bytes, &access, 1);
  }

  const Gpu& gpu_;
  const Run& run_;
  std::size_t number_;
  std::uint64_t largest_;
  std::size_t granularity_ = 0;
  cuda::CUmemAllocationProp prop_{};
  cuda::CUmemGenericAllocationHandle handle_ = 0;
  std::uint64_t allocations_ = 0;
  Buffer live_[kLive];
  std::atomic<std::uint64_t> passes_{0};
};

}  // namespace

void run_churn(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const std::size_t count = run.options().threads;
  std::atomic<bool> stop{false};
  std::vector<std::unique_ptr<Tenant>> tenants;
  for (std::size_t i = 0; i < count; ++i) {
    tenants.push_back(
        std::make_unique<Tenant>(gpu, run, i, run.size_or(kDefaultSize) / count / kLive));
  }
  // On few processors the threads take half of the time of all, so that the tools that the test
  // is about come to work as well: 4 threads on 2 processors made each suspend take four times as
  // long.
  const double processors = std::max(1U, std::thread::hardware_concurrency());
  const double rest = 2 * static_cast<double>(count) / processors - 1;
  std::vector<std::jthread> threads;
  for (auto& tenant : tenants)
    threads.emplace_back([&stop, rest, &it = *tenant] { it.work(stop, rest); });
  while (run.next()) {
    std::vector<std::uint64_t> before;
    for (const auto& tenant : tenants)
      before.push_back(tenant->passes());
    for (std::size_t i = 0; i < count; ++i) {
      while (tenants[i]->passes() == before[i])
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    run.finish();
  }
  stop = true;
}

}  // namespace stasis::workloads
