// How a program gives the simulated driver the kernels that its PTX describes.
//
// The simulated driver reads PTX only as far as `.entry NAME(...)` and its parameters; what the
// kernel does is a function of the program with the name stasis_sim_kernel_NAME, found by dlsym, so
// the program is linked with -rdynamic. Under the real driver nothing calls it. Example:
//
//   extern "C" void stasis_sim_kernel_add(const stasis::sim::Launch& launch, void** args) {
//     auto* data = *static_cast<float**>(args[0]);
//     auto n = *static_cast<unsigned*>(args[1]);
//     for (unsigned i = 0; i < n && i < launch.threads(); ++i) data[i] += 1;
//   }
//
// Ownership: `args` and what it points to are copies made at the launch and live until the function
// returns. Device pointers can be read and written directly.
// Threads: called on a thread of the stream, all signals blocked, once per launch (not once per
// thread of the grid); it must not call the CUDA API and must not throw.
#pragma once

#include <cstdint>

namespace stasis::sim {

struct Dim3 {
  unsigned int x, y, z;
};

struct Launch {
  Dim3 grid;
  Dim3 block;
  unsigned int shared_bytes;
  int device;  // ordinal in this process

  // All threads of the grid.
  std::uint64_t threads() const {
    return std::uint64_t{grid.x} * grid.y * grid.z * block.x * block.y * block.z;
  }
};

using KernelFunction = void(const Launch& launch, void** args);

}  // namespace stasis::sim
