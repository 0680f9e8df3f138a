// An allocator with a sleep mode, as inference servers have: memory that the program manages
// itself, of which the weights go to host memory and the rest is given up, while all addresses
// stay.
#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::size_t kRegions = 6;
constexpr std::size_t kWeights = 4;  // of those; the others are a cache that is made anew
constexpr std::uint64_t kSleepSize = 48u << 20;
constexpr std::uint64_t kAwake = 4;  // rounds
constexpr std::uint64_t kAsleep = 4;

class Region {
 public:
  Region(const Gpu& gpu, std::size_t number, std::uint64_t size) : gpu_(gpu) {
    // No handle types: no other process is to get this memory.
    prop_.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop_.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal()};
    std::size_t granularity = 0;
    gpu.cuda().cuMemGetAllocationGranularity(&granularity, &prop_,
                                             cuda::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    bytes_ = (size + granularity - 1) / granularity * granularity;
    gpu.cuda().cuMemAddressReserve(&buffer_.data, bytes_, granularity, 0, 0);
    buffer_.name = "region " + std::to_string(number);
    buffer_.words = bytes_ / sizeof(std::uint64_t);
    take();
  }

  Buffer& buffer() { return buffer_; }

  // The address stays reserved. All work on it must be finished.
  void give_up() {
    gpu_.cuda().cuMemUnmap(buffer_.data, bytes_);
    gpu_.cuda().cuMemRelease(handle_);
  }
  void take() {
    gpu_.cuda().cuMemCreate(&handle_, bytes_, &prop_, 0);
    gpu_.cuda().cuMemMap(buffer_.data, bytes_, 0, handle_, 0);
    const cuda::CUmemAccessDesc access{prop_.location, cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    gpu_.cuda().cuMemSetAccess(buffer_.data, bytes_, &access, 1);
  }

  void save() {
    if (host_ == nullptr) {
      void* host = nullptr;
      gpu_.cuda().cuMemAllocHost_v2(&host, bytes_);
      host_ = static_cast<std::uint64_t*>(host);
    }
    gpu_.cuda().cuMemcpyDtoH_v2(host_, buffer_.data, bytes_);
  }
  void bring_back() const { gpu_.cuda().cuMemcpyHtoD_v2(buffer_.data, host_, bytes_); }
  void verify_saved(const Run& run) const {
    verify_words(run, buffer_.name + " while asleep", host_, 0, buffer_.words, buffer_.seed);
  }

 private:
  const Gpu& gpu_;
  cuda::CUmemAllocationProp prop_{};
  cuda::CUmemGenericAllocationHandle handle_ = 0;
  std::uint64_t bytes_ = 0;
  Buffer buffer_;
  std::uint64_t* host_ = nullptr;
};

}  // namespace

void run_sleep(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  std::vector<Region> regions;
  for (std::size_t i = 0; i < kRegions; ++i)
    regions.emplace_back(gpu, i, run.size_or(kSleepSize) / kRegions);
  Checker checker(gpu, kRegions);
  const auto fill = [&](std::size_t i) {
    Buffer& buffer = regions[i].buffer();
    buffer.seed = run.seed(run.round(), 100 + i);
    gpu.kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
  };
  for (std::size_t i = 0; i < kRegions; ++i)
    fill(i);

  bool asleep = false;
  while (run.next()) {
    const bool sleeps = run.round() % (kAwake + kAsleep) >= kAwake;
    if (sleeps && !asleep) {
      for (std::size_t i = 0; i < kRegions; ++i) {
        if (i < kWeights) regions[i].save();
        regions[i].give_up();
      }
    } else if (!sleeps && asleep) {
      for (std::size_t i = 0; i < kRegions; ++i) {
        regions[i].take();
        if (i < kWeights)
          regions[i].bring_back();
        else
          fill(i);
      }
    }
    asleep = sleeps;
    if (asleep) {
      for (std::size_t i = 0; i < kWeights; ++i)
        regions[i].verify_saved(run);
    } else {
      checker.begin(nullptr);
      for (std::size_t i = 0; i < kRegions; ++i)
        checker.advance(nullptr, regions[i].buffer(), run.seed(run.round(), i));
      checker.verify(nullptr, run);
    }
    run.finish();
  }
}

}  // namespace stasis::workloads
