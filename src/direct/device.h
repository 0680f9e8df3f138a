// A GPU as the mover uses it, and device memory of other processes mapped on it.
//
// Threads: one at a time, but for what the copying threads read.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/cuda_state.h"
#include "direct/content.h"
#include "direct/device_calls.h"
#include "direct/stop.h"

namespace stasis::direct {

// Owns a reference to the GPU's primary context, and streams in it.
class Device {
 public:
  // Takes 0.2 to 0.4 s and some 500 MB of the GPU. kOutOfGpuMemory, kNotSupported.
  static Result<Device> open(const DeviceCalls& calls, int ordinal);
  Device(Device&& other) noexcept
      : calls_(other.calls_),
        ordinal_(other.ordinal_),
        context_(std::exchange(other.context_, nullptr)),
        streams_(std::exchange(other.streams_, {})) {}
  Device& operator=(Device&&) = delete;
  ~Device();

  int ordinal() const { return ordinal_; }
  cuda::CUcontext context() const { return context_; }
  // For the calling thread.
  Result<void> make_current() const;
  // Makes streams until there are `count`, none of which waits for another.
  Result<void> have_streams(unsigned count);
  cuda::CUstream stream(unsigned index) const { return streams_[index]; }

 private:
  Device(const DeviceCalls& calls, int ordinal, cuda::CUcontext context)
      : calls_(&calls), ordinal_(ordinal), context_(context) {}
  const DeviceCalls* calls_;
  int ordinal_;
  cuda::CUcontext context_;
  std::vector<cuda::CUstream> streams_;
};

// Device memory of this process's own. Owns it.
class DeviceMemory {
 public:
  // kOutOfGpuMemory.
  static Result<DeviceMemory> make(const DeviceCalls& calls, const Device& device,
                                   std::uint64_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : calls_(other.calls_), device_(other.device_), base_(std::exchange(other.base_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory();

  cuda::CUdeviceptr base() const { return base_; }
  // A copy still uses it: it stays until the process ends.
  void abandon() { base_ = 0; }

 private:
  DeviceMemory(const DeviceCalls& calls, const Device& device, cuda::CUdeviceptr base)
      : calls_(&calls), device_(&device), base_(base) {}
  const DeviceCalls* calls_;
  const Device* device_;
  cuda::CUdeviceptr base_;
};

// A segment of another process, imported and not yet mapped. Owns the driver's handle.
class Imported {
 public:
  // Takes the segment's descriptor, and closes it. kNotSupported if the driver refuses.
  static Result<Imported> make(const DeviceCalls& calls, Segment segment);
  Imported(Imported&& other) noexcept
      : calls_(other.calls_),
        handle_(std::exchange(other.handle_, 0)),
        ordinal_(other.ordinal_),
        segment_(std::move(other.segment_)) {}
  Imported& operator=(Imported&&) = delete;
  ~Imported();

  int ordinal() const { return ordinal_; }  // of the GPU it lies on
  const Segment& segment() const { return segment_; }
  cuda::CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  Imported(const DeviceCalls& calls, cuda::CUmemGenericAllocationHandle handle, Segment segment)
      : calls_(&calls), handle_(handle), segment_(std::move(segment)) {}
  const DeviceCalls* calls_;
  cuda::CUmemGenericAllocationHandle handle_;
  int ordinal_ = 0;
  Segment segment_;
};

// Segments of one GPU, mapped one behind the other. Owns the address range and the mappings, by
// which it keeps the memory alive: until it is released, no process's release frees it.
class Mapping {
 public:
  // What was imported may be given back afterwards: the mapping is enough.
  static Result<Mapping> make(const DeviceCalls& calls, const Device& device,
                              const std::vector<Imported>& in_order, Stop& stop);
  Mapping(Mapping&& other) noexcept
      : calls_(other.calls_),
        device_(other.device_),
        base_(std::exchange(other.base_, 0)),
        reserved_(other.reserved_),
        sizes_(std::exchange(other.sizes_, {})) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() { (void)release(); }

  cuda::CUdeviceptr base() const { return base_; }
  // An error if something could not be let go; the rest has been nevertheless.
  Result<void> release();
  // The same but for the segments that lie within the first `bytes`. Returns how many those are.
  Result<std::uint64_t> release_behind(std::uint64_t bytes);
  // Keeps it all until the process ends: a copy that does not end still goes there.
  void abandon() { base_ = 0; }

 private:
  Mapping(const DeviceCalls& calls, const Device& device) : calls_(&calls), device_(&device) {}
  Error not_let_go(cuda::CUresult code, const char* call) const;
  const DeviceCalls* calls_;
  const Device* device_;
  cuda::CUdeviceptr base_ = 0;
  std::uint64_t reserved_ = 0;
  std::vector<std::uint64_t> sizes_;  // of what is mapped, one behind the other
};

}  // namespace stasis::direct
