// As much of PTX as a launch needs: the names of the kernels and the sizes of their parameters.
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

// False: this is no PTX text (no .version, or a broken .entry).
bool parse_ptx(std::string_view text, std::vector<PtxKernel>& out);

}  // namespace stasis::sim
