// The kernels of the workloads, once as PTX for a real driver and once as functions of this program
// for the simulated one. Both compute the same, and word() says on the CPU what they wrote.
//
// Everything is in words of 64 bits: sizes of buffers are multiples of 8 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "examples/common/cuda_api.h"

namespace stasis::workloads {

// The word at place `index` of the content called `seed`: splitmix64, so that each place of each
// content is different from every other.
constexpr std::uint64_t word(std::uint64_t index, std::uint64_t seed) {
  std::uint64_t x = index * 0x9e3779b97f4a7c15u + seed;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What `advance` adds up, in device memory; to be zeroed before. Three words.
struct AdvanceResult {
  std::uint64_t checked = 0;     // words looked at
  std::uint64_t wrong = 0;       // of those, not what they had to be
  std::uint64_t worst_rank = 0;  // count - index of some wrong word, the greatest (= first) of all
};

// The kernels, loaded into the context that was current. Launches are asynchronous and end the
// program if they fail. Plain handles, valid as long as the context.
class Kernels {
 public:
  explicit Kernels(const programs::CudaApi& cuda);

  // data[i] = word(i, seed)
  void fill(cuda::CUstream stream, cuda::CUdeviceptr data, std::uint64_t words,
            std::uint64_t seed) const;
  // Checks data[i] == word(i, from), then data[i] = word(i, to); adds to `result`.
  void advance(cuda::CUstream stream, cuda::CUdeviceptr data, std::uint64_t words,
               std::uint64_t from, std::uint64_t to, cuda::CUdeviceptr result) const;
  // target[i] += word(source[i], *key), the key being in device memory.
  void combine(cuda::CUstream stream, cuda::CUdeviceptr target, cuda::CUdeviceptr source,
               std::uint64_t words, cuda::CUdeviceptr key) const;
  // Keeps the GPU busy for that long, then adds one to `done`, a word in device memory.
  void spin(cuda::CUstream stream, std::uint64_t nanoseconds, cuda::CUdeviceptr done) const;

 private:
  template <class... Args>
  void launch(cuda::CUfunction function, cuda::CUstream stream, std::uint64_t words,
              Args... args) const;

  const programs::CudaApi& cuda_;
  cuda::CUfunction fill_ = nullptr;
  cuda::CUfunction advance_ = nullptr;
  cuda::CUfunction combine_ = nullptr;
  cuda::CUfunction spin_ = nullptr;
};

}  // namespace stasis::workloads
