#include "tests/workloads/gpu.h"

#include <cstdio>

namespace stasis::workloads {
namespace {

std::string hex(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

const programs::CudaApi& initialised_driver(const Options& options) {
  const auto& cuda = programs::CudaApi::load(options.lookup, programs::IfAbsent::kSkip);
  cuda.cuInit(0);
  if (device_count(cuda) == 0) programs::die_absent("the CUDA driver sees no GPU");
  return cuda;
}

int device_count(const programs::CudaApi& cuda) {
  int count = 0;
  cuda.cuDeviceGetCount(&count);
  return count;
}

Gpu Gpu::primary(const programs::CudaApi& cuda, int ordinal) {
  cuda::CUdevice device = 0;
  cuda.cuDeviceGet(&device, ordinal);
  cuda::CUcontext context = nullptr;
  cuda.cuDevicePrimaryCtxRetain(&context, device);
  cuda.cuCtxSetCurrent(context);
  return Gpu(cuda, ordinal, context);
}

Gpu Gpu::created(const programs::CudaApi& cuda, int ordinal) {
  cuda::CUdevice device = 0;
  cuda.cuDeviceGet(&device, ordinal);
  cuda::CUcontext context = nullptr;
  cuda.cuCtxCreate_v2(&context, 0, device);
  cuda.cuCtxSetCurrent(context);
  return Gpu(cuda, ordinal, context);
}

cuda::CUdeviceptr Gpu::allocate(std::uint64_t bytes) const {
  cuda::CUdeviceptr pointer = 0;
  cuda_.cuMemAlloc_v2(&pointer, bytes);
  return pointer;
}

cuda::CUdeviceptr Gpu::allocate_row(std::uint64_t bytes) const {
  cuda::CUdeviceptr pointer = 0;
  std::size_t pitch = 0;
  constexpr unsigned kElement = 8;
  cuda_.cuMemAllocPitch_v2(&pointer, &pitch, bytes, 1, kElement);
  return pointer;
}

cuda::CUstream Gpu::stream() const {
  cuda::CUstream made = nullptr;
  cuda_.cuStreamCreate(&made, cuda::CU_STREAM_NON_BLOCKING);
  return made;
}

Checker::Checker(const Gpu& gpu, std::size_t slots)
    : gpu_(gpu), slots_(slots), results_(gpu.allocate(slots * sizeof(AdvanceResult))) {}

void Checker::begin(cuda::CUstream stream) {
  batch_.clear();
  gpu_.cuda().cuMemsetD8Async(results_, 0, slots_ * sizeof(AdvanceResult), stream);
}

void Checker::advance(cuda::CUstream stream, Buffer& buffer, std::uint64_t to) {
  if (batch_.size() == slots_) programs::die(1, "internal error: more buffers than slots");
  gpu_.kernels().advance(stream, buffer.data, buffer.words, buffer.seed, to,
                         results_ + batch_.size() * sizeof(AdvanceResult));
  batch_.push_back({buffer.name, buffer.words, buffer.seed});
  buffer.seed = to;
}

void Checker::verify(cuda::CUstream stream, const Run& run) {
  std::vector<AdvanceResult> results(slots_);
  gpu_.cuda().cuStreamSynchronize(stream);
  gpu_.cuda().cuMemcpyDtoH_v2(results.data(), results_, slots_ * sizeof(AdvanceResult));
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    const Expected& expected = batch_[i];
    if (results[i].wrong != 0) {
      run.mismatch(expected.name + ": " + std::to_string(results[i].wrong) + " of " +
                   std::to_string(expected.words) + " words wrong, the first at " +
                   std::to_string(expected.words - results[i].worst_rank));
    }
    if (results[i].checked != expected.words) {
      run.mismatch(expected.name + ": the kernel looked at " + std::to_string(results[i].checked) +
                   " words instead of " + std::to_string(expected.words));
    }
  }
}

void verify_span(const Gpu& gpu, const Run& run, const Buffer& buffer, std::uint64_t first,
                 std::uint64_t count) {
  std::vector<std::uint64_t> copy(count);
  gpu.cuda().cuMemcpyDtoH_v2(copy.data(), buffer.data + first * sizeof(std::uint64_t),
                             count * sizeof(std::uint64_t));
  verify_words(run, buffer.name, copy.data(), first, count, buffer.seed);
}

void verify_words(const Run& run, const std::string& name, const std::uint64_t* data,
                  std::uint64_t first, std::uint64_t count, std::uint64_t seed) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t wanted = word(first + i, seed);
    if (data[i] != wanted) {
      run.mismatch(name + ": word " + std::to_string(first + i) + " is " + hex(data[i]) +
                   " instead of " + hex(wanted));
    }
  }
}

}  // namespace stasis::workloads
