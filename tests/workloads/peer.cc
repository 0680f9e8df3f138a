// Two GPUs that work on each other's memory: what was allocated before they were allowed to and
// what came after, plain and mapped by the program. Each buffer is checked and changed by the one
// GPU in a round, and by the other in the next.
#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kPeerSize = 64u << 20;
constexpr std::uint64_t kSmall = 64u << 10;  // bytes; stays with the driver
constexpr std::uint64_t kRenewEvery = 4;     // rounds
constexpr std::size_t kGpus = 2;

void enable(const Gpu& accessor, const Gpu& owner) {
  const auto& cuda = accessor.cuda();
  int can = 0;
  cuda.cuDeviceCanAccessPeer(&can, accessor.ordinal(), owner.ordinal());
  if (!can) {
    programs::die_absent("GPU " + std::to_string(accessor.ordinal()) +
                         " cannot access the memory of GPU " + std::to_string(owner.ordinal()));
  }
  owner.make_current();
  cuda::CUcontext context = nullptr;
  cuda.cuCtxGetCurrent(&context);
  accessor.make_current();
  cuda.cuCtxEnablePeerAccess(context, 0);
}

// Memory that both may use because the program has mapped it so.
cuda::CUdeviceptr map_for_both(const Gpu& owner, std::uint64_t& bytes) {
  const auto& cuda = owner.cuda();
  cuda::CUmemAllocationProp prop{};
  prop.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, owner.ordinal()};
  std::size_t granularity = 0;
  cuda.cuMemGetAllocationGranularity(&granularity, &prop, cuda::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  bytes = (bytes + granularity - 1) / granularity * granularity;
  cuda::CUmemAccessDesc access[kGpus];
  for (int i = 0; i < static_cast<int>(kGpus); ++i) {
    access[i] = {{cuda::CU_MEM_LOCATION_TYPE_DEVICE, i}, cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  }
  cuda::CUdeviceptr address = 0;
  cuda::CUmemGenericAllocationHandle handle = 0;
  cuda.cuMemAddressReserve(&address, bytes, 0, 0, 0);
  cuda.cuMemCreate(&handle, bytes, &prop, 0);
  cuda.cuMemMap(address, bytes, 0, handle, 0);
  cuda.cuMemSetAccess(address, bytes, access, kGpus);
  return address;
}

class Peers {
 public:
  explicit Peers(Run& run)
      : run_(run),
        gpus_{Gpu::primary(initialised_driver(run.options()), 0),
              Gpu::primary(initialised_driver(run.options()), 1)} {
    const std::uint64_t size = run.size_or(kPeerSize) / (3 * kGpus);
    for (std::size_t i = 0; i < kGpus; ++i) {
      add(i, "before", size, false);
      add(i, "before", kSmall, false);
    }
    for (std::size_t i = 0; i < kGpus; ++i)
      enable(gpus_[i], gpus_[kGpus - 1 - i]);
    for (std::size_t i = 0; i < kGpus; ++i) {
      renewed_.push_back(buffers_.size());
      add(i, "after", size, false);
      add(i, "after", kSmall, false);
      add(i, "mapped", size, true);
    }
  }

  void go() {
    Checker checkers[kGpus] = {checker(0), checker(1)};
    while (run_.next()) {
      if (run_.round() % kRenewEvery == 0) renew();
      for (std::size_t i = 0; i < kGpus; ++i) {
        gpus_[i].make_current();
        checkers[i].begin(nullptr);
        for (std::size_t at = 0; at < buffers_.size(); ++at) {
          if ((at + run_.round()) % kGpus == i)
            checkers[i].advance(nullptr, buffers_[at], run_.seed(run_.round(), at));
        }
      }
      for (std::size_t i = 0; i < kGpus; ++i) {
        gpus_[i].make_current();
        checkers[i].verify(nullptr, run_);
      }
      run_.finish();
    }
  }

 private:
  Checker checker(std::size_t i) {
    gpus_[i].make_current();
    return Checker(gpus_[i], buffers_.size());
  }

  void add(std::size_t owner, const std::string& when, std::uint64_t bytes, bool mapped) {
    gpus_[owner].make_current();
    Buffer buffer;
    buffer.data = mapped ? map_for_both(gpus_[owner], bytes) : gpus_[owner].allocate(bytes);
    buffer.name =
        when + ", on GPU " + std::to_string(owner) + " (" + std::to_string(bytes) + " bytes)";
    buffer.words = bytes / sizeof(std::uint64_t);
    buffer.seed = run_.seed(0, buffers_.size());
    fill(owner, buffer);
    buffers_.push_back(buffer);
  }

  void fill(std::size_t owner, const Buffer& buffer) {
    gpus_[owner].kernels().fill(nullptr, buffer.data, buffer.words, buffer.seed);
    gpus_[owner].cuda().cuCtxSynchronize();
  }

  // New memory, which the other GPU may use because it may use all.
  void renew() {
    for (std::size_t owner = 0; owner < kGpus; ++owner) {
      Buffer& buffer = buffers_[renewed_[owner]];
      gpus_[owner].make_current();
      gpus_[owner].cuda().cuMemFree_v2(buffer.data);
      buffer.data = gpus_[owner].allocate(buffer.bytes());
      buffer.seed = run_.seed(run_.round(), 1000 + owner);
      fill(owner, buffer);
    }
  }

  Run& run_;
  Gpu gpus_[kGpus];
  std::vector<Buffer> buffers_;
  std::vector<std::size_t> renewed_;
};

}  // namespace

void run_peer(Run& run) {
  const auto& cuda = initialised_driver(run.options());
  if (device_count(cuda) < static_cast<int>(kGpus)) programs::die_absent("there is one GPU only");
  Peers(run).go();
}

}  // namespace stasis::workloads
