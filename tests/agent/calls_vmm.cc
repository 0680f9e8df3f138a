// Virtual memory management by the program itself.
#include <unistd.h>

#include <cstring>
#include <vector>

#include "calls.h"

namespace stasis::agent_test {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

CUmemAllocationProp prop_of(unsigned handle_types) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  prop.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(handle_types);
  return prop;
}

CUresult allow(CUdeviceptr address, std::size_t size, CUmemAccess_flags flags) {
  const CUmemAccessDesc right{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, flags};
  return CU(cuMemSetAccess)(address, size, &right, 1);
}

long long rights_of(CUdeviceptr address) {
  const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  unsigned long long flags = 99;
  if (CU(cuMemGetAccess)(&flags, &location, address) != CUDA_SUCCESS) return -1;
  return static_cast<long long>(flags);
}

long long first_byte(CUdeviceptr address) {
  unsigned char byte = 0;
  const auto result = CU(cuMemcpyDtoH_v2)(&byte, address, 1);
  return result == CUDA_SUCCESS ? byte : -static_cast<long long>(result);
}

}  // namespace

void try_vmm() {
  constexpr std::size_t kSize = 8 * kMiB;
  std::printf("== VMM\n");
  const auto prop = prop_of(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  const auto unshared = prop_of(0);
  std::size_t granularity = 0;
  SAY(CU(cuMemGetAllocationGranularity)(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  SAY(granularity);
  CUmemGenericAllocationHandle handle = 0;
  SAY(CU(cuMemCreate)(&handle, kSize + 1, &prop, 0));
  SAY(CU(cuMemCreate)(nullptr, kSize, &prop, 0));
  SAY(CU(cuMemCreate)(&handle, kSize, nullptr, 0));
  SAY(CU(cuMemCreate)(&handle, kSize, &prop, 1));
  SAY(CU(cuMemCreate)(&handle, kSize, &prop, 0));
  CUdeviceptr address = 0;
  CUdeviceptr elsewhere = 0;
  SAY(CU(cuMemAddressReserve)(&address, 2 * kSize, 0, 0, 0));
  SAY(CU(cuMemAddressReserve)(&elsewhere, kSize, 0, 0, 0));
  SAY(CU(cuMemMap)(address, kSize / 2, 0, handle, 0));
  SAY(CU(cuMemMap)(address, kSize, 0, handle, 0));
  SAY(CU(cuMemMap)(address, kSize, 0, handle, 0));
  SAY(rights_of(address));
  SAY(allow(address, kSize, CU_MEM_ACCESS_FLAGS_PROT_READ));
  SAY(allow(address, kSize, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  SAY(allow(address, 2 * kSize, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  SAY(rights_of(address));
  SAY(CU(cuMemsetD8_v2)(address, 0x42, kSize));
  SAY(first_byte(address + kSize - 1));
  SAY(CU(cuMemFree_v2)(address));

  CUmemGenericAllocationHandle retained = 0;
  SAY(CU(cuMemRetainAllocationHandle)(&retained, reinterpret_cast<void*>(address + kMiB)));
  SAY(CU(cuMemRetainAllocationHandle)(nullptr, reinterpret_cast<void*>(address)));
  CUmemAllocationProp seen{};
  SAY(CU(cuMemGetAllocationPropertiesFromHandle)(&seen, retained));
  SAY(seen.requestedHandleTypes);
  SAY(seen.location.id);
  SAY(CU(cuMemRelease)(retained));

  // Somewhere else, with its content.
  SAY(CU(cuMemUnmap)(address + kMiB, kMiB));
  SAY(CU(cuMemUnmap)(address, kSize));
  SAY(first_byte(address));
  SAY(CU(cuMemUnmap)(elsewhere + kMiB, 4 * kSize));
  SAY(CU(cuMemMap)(elsewhere, kSize, 0, handle, 0));
  SAY(allow(elsewhere, kSize, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  SAY(first_byte(elsewhere + 77));

  // To others, and from there in again.
  int fd = -1;
  SAY(CU(cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  SAY(fd >= 0);
  CUmemGenericAllocationHandle imported = 0;
  SAY(CU(cuMemImportFromShareableHandle)(&imported,
                                         reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  // Once more.
  CUmemGenericAllocationHandle second = 0;
  SAY(CU(cuMemImportFromShareableHandle)(&second,
                                         reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  ::close(fd);
  SAY(CU(cuMemMap)(address, kSize / 2, 0, second, 0));
  SAY(CU(cuMemRelease)(second));
  SAY(CU(cuMemMap)(address, kSize, 0, imported, 0));
  SAY(allow(address, kSize, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  SAY(CU(cuMemsetD8_v2)(address, 0x24, kSize));
  SAY(first_byte(elsewhere));
  SAY(CU(cuMemUnmap)(address, kSize));
  SAY(CU(cuMemRelease)(imported));

  // Given up before it is unmapped.
  SAY(CU(cuMemRelease)(handle));
  SAY(CU(cuMemRelease)(handle));
  SAY(CU(cuMemRetainAllocationHandle)(&retained, reinterpret_cast<void*>(elsewhere)));
  SAY(retained == handle);
  SAY(CU(cuMemRelease)(handle));
  SAY(CU(cuMemRelease)(handle));
  SAY(first_byte(elsewhere));
  SAY(CU(cuMemUnmap)(elsewhere, kSize));

  // What was not asked to be shared cannot be.
  SAY(CU(cuMemCreate)(&handle, kSize, &unshared, 0));
  SAY(CU(cuMemGetAllocationPropertiesFromHandle)(&seen, handle));
  SAY(seen.requestedHandleTypes);
  SAY(CU(cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  SAY(CU(cuMemRelease)(handle));

  // What cuMemAlloc gave is none of this.
  CUdeviceptr plain = 0;
  SAY(CU(cuMemAlloc_v2)(&plain, kSize));
  SAY(CU(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(plain)));
  SAY(CU(cuMemUnmap)(plain, kSize));
  SAY(CU(cuMemAddressFree)(plain, kSize));
  SAY(CU(cuMemsetD8_v2)(plain, 1, kSize));
  SAY(CU(cuMemFree_v2)(plain));
  SAY(CU(cuMemAddressFree)(address, 2 * kSize));
  SAY(CU(cuMemAddressFree)(elsewhere, kSize));
}

}  // namespace stasis::agent_test
