#include "direct/device.h"

#include <fmt/format.h>

#include "base/units.h"

namespace stasis::direct {

Result<Device> Device::open(const DeviceCalls& calls, int ordinal) {
  cuda::CUcontext context = nullptr;
  if (auto code = calls.retain_context(&context, ordinal); code != cuda::CUDA_SUCCESS) {
    return stasis::fail(calls.error(code, "cuDevicePrimaryCtxRetain",
                                    fmt::format("use GPU {} to copy its memory", ordinal)));
  }
  return Device(calls, ordinal, context);
}

Device::~Device() {
  if (context_ == nullptr) return;
  (void)calls_->set_context(context_);
  for (cuda::CUstream stream : streams_)
    (void)calls_->destroy_stream(stream);
  (void)calls_->set_context(nullptr);
  (void)calls_->release_context(ordinal_);
}

Result<void> Device::make_current() const {
  const auto code = calls_->set_context(context_);
  if (code == cuda::CUDA_SUCCESS) return {};
  return stasis::fail(calls_->error(code, "cuCtxSetCurrent", fmt::format("use GPU {}", ordinal_)));
}

Result<void> Device::have_streams(unsigned count) {
  if (streams_.size() >= count) return {};
  STASIS_TRY(make_current());
  while (streams_.size() < count) {
    cuda::CUstream stream = nullptr;
    const auto code = calls_->create_stream(&stream, cuda::CU_STREAM_NON_BLOCKING);
    if (code != cuda::CUDA_SUCCESS) {
      return stasis::fail(calls_->error(
          code, "cuStreamCreate", fmt::format("copy with {} streams of GPU {}", count, ordinal_)));
    }
    streams_.push_back(stream);
  }
  return {};
}

Result<DeviceMemory> DeviceMemory::make(const DeviceCalls& calls, const Device& device,
                                        std::uint64_t bytes) {
  STASIS_TRY(device.make_current());
  cuda::CUdeviceptr base = 0;
  if (auto code = calls.allocate(&base, bytes); code != cuda::CUDA_SUCCESS) {
    return stasis::fail(
        calls.error(code, "cuMemAlloc",
                    fmt::format("take {} of GPU {}", format_bytes(bytes), device.ordinal())));
  }
  return DeviceMemory(calls, device, base);
}

DeviceMemory::~DeviceMemory() {
  if (base_ != 0 && device_->make_current()) (void)calls_->free(base_);
}

Result<Imported> Imported::make(const DeviceCalls& calls, Segment segment) {
  cuda::CUmemGenericAllocationHandle handle = 0;
  // The descriptor travels in the pointer itself.
  auto* descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(segment.handle.get()));
  const auto what =
      fmt::format("import {} of another process's GPU memory", format_bytes(segment.bytes));
  auto code = calls.import(&handle, descriptor, cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (code != cuda::CUDA_SUCCESS) {
    Error error = calls.error(code, "cuMemImportFromShareableHandle", what);
    if (code == cuda::CUDA_ERROR_INVALID_VALUE || code == cuda::CUDA_ERROR_INVALID_HANDLE) {
      error.code = ErrorCode::kNotSupported;
      error.remedy = "go without the direct path";
    }
    return stasis::fail(std::move(error));
  }
  segment.handle.reset();
  Imported imported(calls, handle, std::move(segment));
  cuda::CUmemAllocationProp prop{};
  code = calls.properties(&prop, handle);
  if (code != cuda::CUDA_SUCCESS) {
    return stasis::fail(calls.error(code, "cuMemGetAllocationPropertiesFromHandle", what));
  }
  if (prop.location.type != cuda::CU_MEM_LOCATION_TYPE_DEVICE) {
    return stasis::fail(
        ErrorCode::kNotSupported,
        fmt::format("{} of memory that was exported lie on no GPU (CUmemLocationType {})",
                    format_bytes(imported.segment().bytes),
                    static_cast<unsigned>(prop.location.type)),
        "go without the direct path");
  }
  imported.ordinal_ = prop.location.id;
  return imported;
}

Imported::~Imported() {
  if (handle_ != 0) (void)calls_->release(handle_);
}

Result<Mapping> Mapping::make(const DeviceCalls& calls, const Device& device,
                              const std::vector<Imported>& in_order, Stop& stop) {
  Mapping mapping(calls, device);
  STASIS_TRY(device.make_current());
  std::uint64_t total = 0;
  for (const Imported& one : in_order)
    total += one.segment().bytes;
  const auto refused = [&](cuda::CUresult code, const char* call) {
    return stasis::fail(calls.error(code, call,
                                    fmt::format("map {} of another process's memory on GPU {}",
                                                format_bytes(total), device.ordinal())));
  };
  if (auto code = calls.reserve(&mapping.base_, total, 0, 0, 0); code != cuda::CUDA_SUCCESS) {
    mapping.base_ = 0;
    return refused(code, "cuMemAddressReserve");
  }
  mapping.reserved_ = total;
  cuda::CUdeviceptr at = mapping.base_;
  for (const Imported& one : in_order) {
    if (!stop.go_on()) return stasis::fail(stop.result().error());
    const std::uint64_t bytes = one.segment().bytes;
    if (auto code = calls.map(at, bytes, 0, one.handle(), 0); code != cuda::CUDA_SUCCESS) {
      return refused(code, "cuMemMap");
    }
    mapping.sizes_.push_back(bytes);
    at += bytes;
  }
  cuda::CUmemAccessDesc access{};
  access.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, device.ordinal()};
  access.flags = cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const auto code = calls.set_access(mapping.base_, total, &access, 1);
  if (code != cuda::CUDA_SUCCESS) return refused(code, "cuMemSetAccess");
  return mapping;
}

Result<void> Mapping::release() {
  auto result = release_behind(0);
  if (base_ != 0) {
    const auto code = calls_->unreserve(std::exchange(base_, 0), reserved_);
    if (code != cuda::CUDA_SUCCESS && result)
      result = stasis::fail(not_let_go(code, "cuMemAddressFree"));
  }
  STASIS_TRY(std::move(result));
  return {};
}

Result<std::uint64_t> Mapping::release_behind(std::uint64_t bytes) {
  if (base_ == 0) return 0;
  Result<void> result = device_->make_current();
  std::uint64_t kept = 0;
  std::size_t first = 0;
  while (first < sizes_.size() && sizes_[first] <= bytes - kept)
    kept += sizes_[first++];
  cuda::CUdeviceptr at = base_ + kept;
  // One by one: a range over several mappings is not documented to be unmapped at once.
  for (std::size_t i = first; i < sizes_.size(); ++i) {
    const auto code = calls_->unmap(at, sizes_[i]);
    if (code != cuda::CUDA_SUCCESS && result) result = stasis::fail(not_let_go(code, "cuMemUnmap"));
    at += sizes_[i];
  }
  sizes_.resize(first);
  STASIS_TRY(std::move(result));
  return kept;
}

Error Mapping::not_let_go(cuda::CUresult code, const char* call) const {
  return calls_->error(code, call, "let go of another process's GPU memory");
}

}  // namespace stasis::direct
