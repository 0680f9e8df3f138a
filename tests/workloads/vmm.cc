// Virtual memory management: one address range, mapped from several pieces of physical memory that
// are exchanged and replaced under it.
#include <unistd.h>

#include <utility>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::size_t kChunks = 4;
constexpr std::uint64_t kVmmSize = 32u << 20;
constexpr std::uint64_t kSwapEvery = 4;
constexpr std::uint64_t kReplaceEvery = 6;

class Range {
 public:
  Range(const Gpu& gpu, std::uint64_t size) : gpu_(gpu) {
    prop_.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop_.requestedHandleTypes = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop_.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal()};
    std::size_t granularity = 0;
    gpu.cuda().cuMemGetAllocationGranularity(&granularity, &prop_,
                                             cuda::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    chunk_bytes_ = (size / kChunks + granularity - 1) / granularity * granularity;
    // With a part in the middle in which nothing is mapped.
    gpu.cuda().cuMemAddressReserve(&base_, (kChunks + 1) * chunk_bytes_, 0, 0, 0);
    for (std::size_t i = 0; i < kChunks; ++i) {
      const std::size_t place = i < kChunks / 2 ? i : i + 1;
      chunks_.push_back({"chunk " + std::to_string(i), base_ + place * chunk_bytes_,
                         chunk_bytes_ / sizeof(std::uint64_t), 0});
      handles_.push_back(create());
      map(i);
    }
  }

  std::vector<Buffer>& chunks() { return chunks_; }

  // Exchanges the physical memory of two chunks; the content moves with it. All work on them must
  // be finished.
  void swap(std::size_t a, std::size_t b) {
    unmap(a);
    unmap(b);
    std::swap(handles_[a], handles_[b]);
    std::swap(chunks_[a].seed, chunks_[b].seed);
    map(a);
    map(b);
  }

  // Gives a chunk other physical memory, with no content yet.
  void replace(std::size_t i) {
    unmap(i);
    gpu_.cuda().cuMemRelease(handles_[i]);
    handles_[i] = create();
    map(i);
  }

 private:
  cuda::CUmemGenericAllocationHandle create() {
    cuda::CUmemGenericAllocationHandle handle = 0;
    gpu_.cuda().cuMemCreate(&handle, chunk_bytes_, &prop_, 0);
    // Exported once, as a program does that hands it to another; the descriptor is closed again,
    // because an open one cannot be dumped.
    int fd = -1;
    gpu_.cuda().cuMemExportToShareableHandle(&fd, handle,
                                             cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    close(fd);
    return handle;
  }
  void map(std::size_t i) {
    gpu_.cuda().cuMemMap(chunks_[i].data, chunk_bytes_, 0, handles_[i], 0);
    const cuda::CUmemAccessDesc access{prop_.location, cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    gpu_.cuda().cuMemSetAccess(chunks_[i].data, chunk_bytes_, &access, 1);
  }
  void unmap(std::size_t i) { gpu_.cuda().cuMemUnmap(chunks_[i].data, chunk_bytes_); }

  const Gpu& gpu_;
  cuda::CUmemAllocationProp prop_{};
  std::uint64_t chunk_bytes_ = 0;
  cuda::CUdeviceptr base_ = 0;
  std::vector<Buffer> chunks_;
  std::vector<cuda::CUmemGenericAllocationHandle> handles_;
};

}  // namespace

void run_vmm(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const cuda::CUstream stream = gpu.stream();
  Range range(gpu, run.size_or(kVmmSize));
  Checker checker(gpu, kChunks);
  auto fill = [&](std::size_t i) {
    Buffer& chunk = range.chunks()[i];
    chunk.seed = run.seed(run.round(), 100 + i);
    gpu.kernels().fill(stream, chunk.data, chunk.words, chunk.seed);
    gpu.cuda().cuStreamSynchronize(stream);
  };
  for (std::size_t i = 0; i < kChunks; ++i)
    fill(i);

  while (run.next()) {
    checker.begin(stream);
    for (std::size_t i = 0; i < kChunks; ++i) {
      checker.advance(stream, range.chunks()[i], run.seed(run.round(), i));
    }
    checker.verify(stream, run);
    if (run.options().renew_every == 0) {
      run.finish();
      continue;
    }
    if (run.round() % kSwapEvery == 0) range.swap(0, 1 + run.round() / kSwapEvery % (kChunks - 1));
    if (run.round() % kReplaceEvery == 0) {
      const std::size_t i = run.round() / kReplaceEvery % kChunks;
      range.replace(i);
      fill(i);
    }
    run.finish();
  }
}

}  // namespace stasis::workloads
