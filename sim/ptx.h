// As much of PTX as a launch needs: the names of the kernels and the sizes of their parameters, and
// the managed variables.
//
// Threads: a pure function.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace stasis::sim {

struct PtxParameter {
  std::size_t offset = 0;  // in the argument buffer, aligned as PTX lays it out
  std::size_t size = 0;    // bytes
};

struct PtxKernel {
  std::string name;
  std::vector<PtxParameter> parameters;
  std::size_t argument_bytes = 0;
};

// `.global .attribute(.managed)`, in CUDA C++ `__managed__`.
struct PtxVariable {
  std::string name;
  std::size_t size = 0;  // bytes
};

struct PtxModule {
  std::vector<PtxKernel> kernels;
  std::vector<PtxVariable> managed;  // other variables are left out
};

// False: this is no PTX text (no .version, or a broken .entry or .global).
bool parse_ptx(std::string_view text, PtxModule& out);

}  // namespace stasis::sim
