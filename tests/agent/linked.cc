// A program that does not look up the driver's functions: the loader has bound them. Verifies 16
// MiB of device memory over and over, writes the number of each round to the file that its argument
// names, and ends with status 0 on SIGTERM if all of it was right.
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdio>

#include "abi/cuda_abi.h"

extern "C" {
stasis::cuda::fn::cuInit cuInit;
stasis::cuda::fn::cuCtxCreate_v2 cuCtxCreate_v2;
stasis::cuda::fn::cuMemAlloc_v2 cuMemAlloc_v2;
stasis::cuda::fn::cuMemcpyDtoH_v2 cuMemcpyDtoH_v2;
stasis::cuda::fn::cuMemsetD8_v2 cuMemsetD8_v2;
}

namespace {
volatile std::sig_atomic_t g_end = 0;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::signal(SIGTERM, [](int) { g_end = 1; });
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  stasis::cuda::CUcontext context = nullptr;
  stasis::cuda::CUdeviceptr memory = 0;
  if (cuInit(0) != stasis::cuda::CUDA_SUCCESS ||
      cuCtxCreate_v2(&context, 0, 0) != stasis::cuda::CUDA_SUCCESS ||
      cuMemAlloc_v2(&memory, kBytes) != stasis::cuda::CUDA_SUCCESS)
    return 3;
  unsigned number = 1;
  for (; g_end == 0; ++number) {
    unsigned char byte = 0;
    if (number > 1 &&
        (cuMemcpyDtoH_v2(&byte, memory + number % kBytes, 1) != stasis::cuda::CUDA_SUCCESS ||
         byte != static_cast<unsigned char>(number - 1)))
      return 4;
    if (cuMemsetD8_v2(memory, static_cast<unsigned char>(number), kBytes) !=
        stasis::cuda::CUDA_SUCCESS)
      return 5;
    std::FILE* file = std::fopen(argv[1], "w");
    if (!file || std::fprintf(file, "round %012u ok\n", number) < 0 || std::fclose(file) != 0)
      return 6;
    ::usleep(200);
  }
  std::printf("verified %u rounds\n", number - 1);
}
