// Managed memory: what a program sees of it, and of what it says of it.
#include <cstring>
#include <vector>

#include "calls.h"

namespace stasis::agent_test {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

namespace fn {
using cuMemPrefetchAsync_v2 = CUresult(CUdeviceptr, std::size_t, CUmemLocation, unsigned flags,
                                       CUstream);
using cuMemRangeGetAttributes = CUresult(void** data, std::size_t* sizes,
                                         CUmem_range_attribute* attributes, std::size_t count,
                                         CUdeviceptr, std::size_t);
using cuMemAdvise_v2 = CUresult(CUdeviceptr, std::size_t, CUmem_advise, CUmemLocation);
}  // namespace fn

void say_range(CUdeviceptr address, std::size_t bytes) {
  for (const auto which :
       {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION}) {
    int value = 77;
    say("range attribute " + std::to_string(which),
        CU(cuMemRangeGetAttribute)(&value, sizeof value, which, address, bytes));
    SAY(value);
  }
}

void try_managed_sizes(CUcontext context) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{4096}, kMiB, 2 * kMiB, 2 * kMiB + 1,
        5 * kMiB + 777, 32 * kMiB, 40 * kMiB, std::size_t{1} << 60, SIZE_MAX}) {
    for (const unsigned flags : {unsigned{CU_MEM_ATTACH_GLOBAL}, unsigned{CU_MEM_ATTACH_HOST}}) {
      std::printf("== managed: %zu bytes, flags %u\n", size, flags);
      CUdeviceptr address = 0;
      const auto result = CU(cuMemAllocManaged)(&address, size, flags);
      SAY(result);
      if (result != CUDA_SUCCESS) continue;
      SAY(address % 512);
      ask_about("begin", address, address, context);
      ask_about("last byte", address + size - 1, address, context);
      auto* bytes = reinterpret_cast<unsigned char*>(address);
      SAY(bytes[0]);
      SAY(bytes[size - 1]);
      bytes[size - 1] = 7;
      if (flags == CU_MEM_ATTACH_GLOBAL) {
        SAY(spoiled(address, size, 0x5a));
        SAY(bytes[size / 2]);
        say_range(address, size);
      }
      CUipcMemHandle ipc{};
      SAY(CU(cuIpcGetMemHandle)(&ipc, address));
      SAY(CU(cuMemFree_v2)(address + 1));
      SAY(CU(cuMemFree_v2)(address));
      SAY(CU(cuMemFree_v2)(address));
    }
  }
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocManaged)(nullptr, kMiB, CU_MEM_ATTACH_GLOBAL));
  SAY(CU(cuMemAllocManaged)(&address, kMiB, 0));
  SAY(CU(cuMemAllocManaged)(&address, kMiB, CU_MEM_ATTACH_SINGLE));
  SAY(CU(cuMemAllocManaged)(&address, kMiB, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST));
}

void try_advice() {
  int devices = 0;
  CU(cuDeviceGetCount)(&devices);
  constexpr std::size_t kSize = 8 * kMiB;
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocManaged)(&address, kSize, CU_MEM_ATTACH_GLOBAL));
  for (unsigned advice = 0; advice <= 7; ++advice) {
    for (const CUdevice device : {0, 1, 9, int{kDeviceCpu}, -7}) {
      // The second GPU is one that there is, or is not, for both.
      std::printf("== managed: advice %u for %d\n", advice, device);
      SAY(CU(cuMemAdvise)(address, kSize, static_cast<CUmem_advise>(advice), device));
      say_range(address, kSize);
    }
  }
  std::printf("== managed: advice for parts\n");
  SAY(CU(cuMemAdvise)(address + kMiB, kMiB, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
  say_range(address, kSize);
  say_range(address + kMiB, kMiB);
  SAY(CU(cuMemAdvise)(address + 3, 5, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
  SAY(CU(cuMemAdvise)(address, 0, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
  SAY(CU(cuMemAdvise)(address, kSize + 1, CU_MEM_ADVISE_SET_READ_MOSTLY, 0) != CUDA_SUCCESS);
  SAY(CU(cuMemAdvise)(4096, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
  CUdeviceptr plain = 0;
  SAY(CU(cuMemAlloc_v2)(&plain, 4 * kMiB));
  SAY(CU(cuMemAdvise)(plain, kMiB, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
  say_range(plain, kMiB);
  SAY(CU(cuMemFree_v2)(plain));
  if (has("cuMemAdvise_v2")) {
    for (const int type : {1, 2, 3, 4}) {
      std::printf("== managed: advice for a place of type %d\n", type);
      const CUmemLocation where{static_cast<CUmemLocationType>(type), 0};
      SAY(OTHER(cuMemAdvise_v2)(address, kSize, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, where));
      say_range(address, kSize);
    }
  }
  if (has("cuMemRangeGetAttributes")) {
    int first = 77;
    int second = 77;
    void* data[] = {&first, &second};
    std::size_t sizes[] = {sizeof first, sizeof second};
    CUmem_range_attribute which[] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
                                     CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION};
    SAY(OTHER(cuMemRangeGetAttributes)(data, sizes, which, 2, address, kSize));
    SAY(first);
    SAY(second);
  }
  SAY(CU(cuMemFree_v2)(address));
  SAY(devices);
}

void try_prefetch() {
  constexpr std::size_t kSize = 8 * kMiB;
  CUstream stream = nullptr;
  SAY(CU(cuStreamCreate)(&stream, 1));
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocManaged)(&address, kSize, CU_MEM_ATTACH_GLOBAL));
  std::memset(reinterpret_cast<void*>(address), 3, kSize);
  for (const CUdevice device : {0, int{kDeviceCpu}, 1, 9, 0}) {
    std::printf("== managed: prefetch to %d\n", device);
    SAY(CU(cuMemPrefetchAsync)(address, kSize, device, stream));
    SAY(CU(cuStreamSynchronize)(stream));
    say_range(address, kSize);
    SAY(reinterpret_cast<unsigned char*>(address)[kSize - 1]);
  }
  SAY(CU(cuMemPrefetchAsync)(4096, 4096, 0, stream));
  SAY(CU(cuMemPrefetchAsync)(address, 0, 0, stream));
  SAY(CU(cuMemPrefetchAsync)(address, kSize + 1, 0, stream) != CUDA_SUCCESS);
  SAY(CU(cuMemPrefetchAsync)(address + kMiB, kMiB, 0, stream));
  say_range(address, kSize);
  say_range(address + kMiB, kMiB);
  if (has("cuMemPrefetchAsync_v2")) {
    const CUmemLocation gpu{CU_MEM_LOCATION_TYPE_DEVICE, 0};
    SAY(OTHER(cuMemPrefetchAsync_v2)(address, kSize, gpu, 0, stream));
    SAY(OTHER(cuMemPrefetchAsync_v2)(address, kSize, gpu, 1, stream));
  }
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemFree_v2)(address));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

void try_attach() {
  std::printf("== managed: streams\n");
  constexpr std::size_t kSize = 5 * kMiB + 4096;
  CUstream stream = nullptr;
  SAY(CU(cuStreamCreate)(&stream, 1));
  CUdeviceptr address = 0;
  SAY(CU(cuMemAllocManaged)(&address, kSize, CU_MEM_ATTACH_HOST));
  // Others than these three crash the driver (580.159.04).
  for (const unsigned flags : {1U, 2U, 4U}) {
    for (const std::size_t bytes : {std::size_t{0}, kSize, kSize / 2, kSize + 1}) {
      std::printf("-- flags %u, %zu bytes\n", flags, bytes);
      SAY(CU(cuStreamAttachMemAsync)(stream, address, bytes, flags));
      SAY(CU(cuStreamSynchronize)(stream));
      SAY(CU(cuStreamAttachMemAsync)(nullptr, address, bytes, flags));
      SAY(CU(cuCtxSynchronize)());
    }
  }
  SAY(CU(cuStreamAttachMemAsync)(stream, address + 4096, 0, CU_MEM_ATTACH_SINGLE));
  SAY(CU(cuStreamAttachMemAsync)(stream, 4096, 0, CU_MEM_ATTACH_SINGLE));
  SAY(CU(cuStreamAttachMemAsync)(stream, address, 0, CU_MEM_ATTACH_SINGLE));
  SAY(CU(cuMemsetD8Async)(address, 9, kSize, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(reinterpret_cast<unsigned char*>(address)[kSize - 1]);
  SAY(CU(cuStreamDestroy_v2)(stream));
  SAY(reinterpret_cast<unsigned char*>(address)[0]);
  SAY(CU(cuMemFree_v2)(address));
}

void try_managed_lives(CUcontext first) {
  std::printf("== managed: contexts\n");
  CUcontext second = nullptr;
  SAY(CU(cuCtxCreate_v2)(&second, 0, 0));
  CUdeviceptr left = 0;
  SAY(CU(cuMemAllocManaged)(&left, 4 * kMiB, CU_MEM_ATTACH_GLOBAL));
  SAY(CU(cuCtxSetCurrent)(first));
  ask_about("of the second, from the first", left, left, second);
  SAY(spoiled(left, 4 * kMiB, 5));
  SAY(CU(cuCtxDestroy_v2)(second));
  SAY(CU(cuCtxSetCurrent)(first));
  CUdeviceptr base = 0;
  SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, left));
  SAY(CU(cuMemFree_v2)(left));
  CUdeviceptr freed = 0;
  CUstream stream = nullptr;
  SAY(CU(cuStreamCreate)(&stream, 1));
  SAY(CU(cuMemAllocManaged)(&freed, 4 * kMiB, CU_MEM_ATTACH_GLOBAL));
  SAY(CU(cuMemFreeAsync)(freed, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

}  // namespace

void try_managed(CUcontext context) {
  try_managed_sizes(context);
  try_advice();
  try_prefetch();
  try_attach();
  try_managed_lives(context);
}

}  // namespace stasis::agent_test
