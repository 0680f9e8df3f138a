// A context on a GPU with the kernels loaded, and buffers that are verified as they change.
//
// Nothing here is released: the workloads run until the process ends. Gpu may be used from several
// threads once current() was called in each; a Checker and its buffers by one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/workloads/kernels.h"
#include "tests/workloads/runner.h"

namespace stasis::workloads {

// The driver, initialised. Ends the program with kExitSkipped where there is none, or no GPU.
const programs::CudaApi& initialised_driver(const Options& options);
int device_count(const programs::CudaApi& cuda);

class Gpu {
 public:
  // The primary context of a device, made current.
  static Gpu primary(const programs::CudaApi& cuda, int ordinal);
  // A context of its own, made current.
  static Gpu created(const programs::CudaApi& cuda, int ordinal);

  const programs::CudaApi& cuda() const { return cuda_; }
  const Kernels& kernels() const { return kernels_; }
  int ordinal() const { return ordinal_; }
  void make_current() const { cuda_.cuCtxSetCurrent(context_); }

  cuda::CUdeviceptr allocate(std::uint64_t bytes) const;
  // The same by cuMemAllocPitch.
  cuda::CUdeviceptr allocate_row(std::uint64_t bytes) const;
  cuda::CUstream stream() const;

 private:
  Gpu(const programs::CudaApi& cuda, int ordinal, cuda::CUcontext context)
      : cuda_(cuda), ordinal_(ordinal), context_(context), kernels_(cuda) {}

  const programs::CudaApi& cuda_;
  int ordinal_;
  cuda::CUcontext context_;
  Kernels kernels_;
};

// Device memory with known content: word i is word(i, seed).
struct Buffer {
  std::string name;
  cuda::CUdeviceptr data = 0;
  std::uint64_t words = 0;
  std::uint64_t seed = 0;

  std::uint64_t bytes() const { return words * sizeof(std::uint64_t); }
};

// Advances buffers from the content they must have to new content, and tells what was wrong.
class Checker {
 public:
  // For up to `slots` buffers in one batch.
  Checker(const Gpu& gpu, std::size_t slots);

  // Empties the batch.
  void begin(cuda::CUstream stream);
  // Checks all of the buffer against its seed and gives it the content `to`.
  void advance(cuda::CUstream stream, Buffer& buffer, std::uint64_t to);
  // Waits for the stream, and ends the program if any word of the batch was wrong or not looked at.
  void verify(cuda::CUstream stream, const Run& run);

 private:
  struct Expected {
    std::string name;
    std::uint64_t words;
    std::uint64_t seed;
  };
  const Gpu& gpu_;
  std::size_t slots_;
  cuda::CUdeviceptr results_;
  std::vector<Expected> batch_;
};

// Copies words [first, first + count) to the CPU and compares them there.
void verify_span(const Gpu& gpu, const Run& run, const Buffer& buffer, std::uint64_t first,
                 std::uint64_t count);

// Compares `count` words at `data` with word(i, seed), i from `first`.
void verify_words(const Run& run, const std::string& name, const std::uint64_t* data,
                  std::uint64_t first, std::uint64_t count, std::uint64_t seed);

}  // namespace stasis::workloads
