// What the fake driver library was asked, and what it shall answer. A test reaches the one instance
// inside the library by dlsym("fake_libcuda").
#pragma once

#include <string>
#include <vector>

#include "abi/cuda_abi.h"

namespace stasis::fakes {

struct FakeLibcuda {
  // Answers.
  int cuda_version = 13000;
  cuda::CUresult version_result = cuda::CUDA_SUCCESS;
  cuda::CUresult result = cuda::CUDA_SUCCESS;  // of every checkpoint call
  unsigned state = 0;
  // What was asked.
  std::vector<std::string> calls;
  int inits = 0;
  int pid = 0;
  unsigned timeout_ms = 0;
  std::vector<cuda::CUcheckpointGpuPair> pairs;
  bool reserved_zero = true;  // the rest of each argument struct was zero, as the driver demands
};

}  // namespace stasis::fakes
