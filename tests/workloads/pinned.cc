// Pinned host memory of three origins, copied to the GPU and back and also written by a kernel.
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kPinnedSize = 12u << 20;

struct HostBuffer {
  std::string name;
  std::uint64_t* data = nullptr;
  cuda::CUdeviceptr device_view = 0;  // the same memory as the GPU sees it
};

std::uint64_t* anonymous_memory(std::uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    programs::die(1, "cannot map " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  return static_cast<std::uint64_t*>(memory);
}

std::array<HostBuffer, 3> allocate_pinned(const Gpu& gpu, std::uint64_t bytes) {
  std::array<HostBuffer, 3> buffers;
  void* pointer = nullptr;
  gpu.cuda().cuMemAllocHost_v2(&pointer, bytes);
  buffers[0] = {"memory of cuMemAllocHost", static_cast<std::uint64_t*>(pointer), 0};
  gpu.cuda().cuMemHostAlloc(&pointer, bytes,
                            cuda::kMemHostAllocPortable | cuda::kMemHostAllocDeviceMap);
  buffers[1] = {"memory of cuMemHostAlloc", static_cast<std::uint64_t*>(pointer), 0};
  pointer = anonymous_memory(bytes);
  gpu.cuda().cuMemHostRegister_v2(pointer, bytes,
                                  cuda::kMemHostRegisterPortable | cuda::kMemHostRegisterDeviceMap);
  buffers[2] = {"memory of cuMemHostRegister", static_cast<std::uint64_t*>(pointer), 0};
  for (HostBuffer& buffer : buffers) {
    gpu.cuda().cuMemHostGetDevicePointer_v2(&buffer.device_view, buffer.data, 0);
  }
  return buffers;
}

}  // namespace

void run_pinned(Run& run) {
  const Gpu gpu = Gpu::primary(initialised_driver(run.options()), 0);
  const auto& cuda = gpu.cuda();
  const std::uint64_t words = run.size_or(kPinnedSize) / 3 / 4096 * 4096 / sizeof(std::uint64_t);
  const std::uint64_t bytes = words * sizeof(std::uint64_t);
  auto hosts = allocate_pinned(gpu, bytes);
  const cuda::CUdeviceptr device = gpu.allocate(bytes);
  const cuda::CUstream stream = gpu.stream();
  std::vector<std::uint64_t> seeds(hosts.size());

  // In turn: the kernel writes the host memory; what it wrote travels host -> device -> next host.
  auto refill = [&] {
    for (std::size_t i = 0; i < hosts.size(); ++i) {
      seeds[i] = run.seed(run.round(), i);
      gpu.kernels().fill(stream, hosts[i].device_view, words, seeds[i]);
    }
    cuda.cuStreamSynchronize(stream);
  };
  refill();
  while (run.next()) {
    for (std::size_t i = 0; i < hosts.size(); ++i) {
      verify_words(run, hosts[i].name, hosts[i].data, 0, words, seeds[i]);
    }
    for (std::size_t i = 0; i < hosts.size(); ++i) {
      const HostBuffer& from = hosts[i];
      const HostBuffer& to = hosts[(i + 1) % hosts.size()];
      const std::uint64_t seed = run.seed(run.round(), 100 + i);
      for (std::uint64_t w = 0; w < words; ++w)
        from.data[w] = word(w, seed);
      cuda.cuMemcpyHtoDAsync_v2(device, from.data, bytes, stream);
      cuda.cuMemcpyDtoHAsync_v2(to.data, device, bytes, stream);
      cuda.cuStreamSynchronize(stream);
      verify_words(run, to.name + ", copied through the GPU", to.data, 0, words, seed);
    }
    refill();
    run.finish();
  }
}

}  // namespace stasis::workloads
