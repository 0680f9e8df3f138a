// What a program sees of the driver's memory, a line per answer. Addresses are told by how they lie
// to each other, so that two runs of it can be compared line by line: one with the agent, one
// without.
#include "calls.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

namespace stasis::agent_test {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

CUdeviceptr allocate(std::size_t bytes) {
  CUdeviceptr address = 0;
  SAY(CU(cuMemAlloc_v2)(&address, bytes));
  return address;
}

CUcontext context_on(CUdevice device) {
  CUcontext context = nullptr;
  SAY(CU(cuCtxCreate_v2)(&context, 0, device));
  return context;
}

}  // namespace

long long spoiled(CUdeviceptr address, std::size_t bytes, unsigned char with) {
  std::vector<unsigned char> host(bytes, 0);
  if (CU(cuMemsetD8_v2)(address, with, bytes) != CUDA_SUCCESS) return -1;
  if (CU(cuMemcpyDtoH_v2)(host.data(), address, bytes) != CUDA_SUCCESS) return -2;
  long long wrong = 0;
  for (const auto byte : host)
    wrong += byte != with;
  return wrong;
}

namespace {

// What else there is to ask: the number, and whether its value can be compared. An address is told
// by where it lies, and of what is new for each allocation whether there is one.
enum class Told { kValue, kAddress, kWhether, kNothing };
constexpr std::pair<int, Told> kOthers[] = {
    {CU_POINTER_ATTRIBUTE_DEVICE_POINTER, Told::kAddress},
    {CU_POINTER_ATTRIBUTE_HOST_POINTER, Told::kNothing},
    {5 /* P2P_TOKENS */, Told::kNothing},
    {CU_POINTER_ATTRIBUTE_BUFFER_ID, Told::kWhether},
    {CU_POINTER_ATTRIBUTE_IS_MANAGED, Told::kValue},
    {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, Told::kValue},
    {CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, Told::kValue},
    {CU_POINTER_ATTRIBUTE_MAPPED, Told::kValue},
    {15 /* IS_GPU_DIRECT_RDMA_CAPABLE */, Told::kValue},
    {CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, Told::kValue},
    {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, Told::kWhether},
    {18 /* MAPPING_SIZE */, Told::kValue},
    {19 /* MAPPING_BASE_ADDR */, Told::kAddress},
    {20 /* MEMORY_BLOCK_ID */, Told::kWhether},
    {CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE, Told::kValue},
};

void ask_others(CUdeviceptr pointer, CUdeviceptr begin) {
  for (const auto& [number, told] : kOthers) {
    unsigned long long value[2] = {0, 0};
    const auto result =
        CU(cuPointerGetAttribute)(value, static_cast<CUpointer_attribute>(number), pointer);
    say("attribute " + std::to_string(number), result);
    if (result != CUDA_SUCCESS || told == Told::kNothing) continue;
    if (told == Told::kAddress) value[0] = begin - value[0];
    if (told == Told::kWhether) value[0] = value[0] != 0;
    say("it is", static_cast<long long>(value[0]));
  }
}

}  // namespace

void ask_for_dma_buf(CUdeviceptr address, std::size_t size) {
  using Get = CUresult(void*, CUdeviceptr, std::size_t, int, unsigned long long);
  constexpr int kDmaBuf = 1;
  void* get = ::dlsym(driver_library(), "cuMemGetHandleForAddressRange");
  SAY(get != nullptr);
  if (!get) return;
  int fd = -1;
  SAY(reinterpret_cast<Get*>(get)(&fd, address, size, kDmaBuf, 0));
  SAY(fd >= 0);
  if (fd >= 0) ::close(fd);
}

void ask_about(const std::string& what, CUdeviceptr pointer, CUdeviceptr begin, CUcontext context) {
  std::printf("-- %s\n", what.c_str());
  CUdeviceptr base = 0;
  std::size_t size = 0;
  const auto result = CU(cuMemGetAddressRange_v2)(&base, &size, pointer);
  SAY(result);
  if (result == CUDA_SUCCESS) {
    SAY(begin - base);
    SAY(size);
    SAY(CU(cuMemGetAddressRange_v2)(nullptr, &size, pointer));
    SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, pointer));
  }
  unsigned type = 0;
  SAY(CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
  SAY(type);
  CUcontext owner = nullptr;
  SAY(CU(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, pointer));
  SAY(owner == context);
  SAY(owner == nullptr);
  unsigned long long range = 0;
  SAY(CU(cuPointerGetAttribute)(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer));
  SAY(range);
  CUdeviceptr start = 0;
  SAY(CU(cuPointerGetAttribute)(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer));
  if (start) SAY(begin - start);
  unsigned long long types = 77;
  SAY(CU(cuPointerGetAttribute)(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, pointer));
  SAY(types);
  for (const unsigned wanted : {0U, 1U, 0U, 1U}) {
    SAY(CU(cuPointerSetAttribute)(&wanted, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer));
    unsigned synchronous = 0x4d4d4d4d;  // shows how many bytes are written
    SAY(CU(cuPointerGetAttribute)(&synchronous, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer));
    SAY(synchronous);
  }
  SAY(CU(cuPointerSetAttribute)(&types, CU_POINTER_ATTRIBUTE_CONTEXT, pointer));
  // All at once, which must be the same.
  CUcontext owner2 = nullptr;
  unsigned long long range2 = 0;
  CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* where[] = {&owner2, &range2};
  SAY(CU(cuPointerGetAttributes)(2, which, where, pointer));
  SAY(owner2 == owner);
  SAY(range2);
  ask_others(pointer, begin);
}

void ask_behind(CUdeviceptr pointer) {
  std::printf("-- behind\n");
  CUdeviceptr base = 1;
  std::size_t bytes = 1;
  SAY(CU(cuMemGetAddressRange_v2)(&base, &bytes, pointer));
  SAY(base);
  SAY(bytes);
  for (int number = 1; number <= int{CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE}; ++number) {
    auto attribute = static_cast<CUpointer_attribute>(number);
    unsigned long long value = 77;
    void* where = &value;
    say("attribute " + std::to_string(number),
        CU(cuPointerGetAttribute)(where, attribute, pointer));
    SAY(value);
    say("of several", CU(cuPointerGetAttributes)(1, &attribute, &where, pointer));
    SAY(value == pointer);
    if (value != pointer) SAY(value);
  }
}

namespace {

void try_allocations(CUcontext context) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, kMiB, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 5 * kMiB + 777,
        std::size_t{1} << 60, SIZE_MAX, SIZE_MAX - 5}) {
    std::printf("== %zu bytes\n", size);
    const auto address = allocate(size);
    if (!address) continue;
    SAY(address % 256);
    if (size >= 2 * kMiB) SAY(address % (2 * kMiB));
    ask_about("begin", address, address, context);
    ask_about("last byte", address + size - 1, address, context);
    if (size >= 2 * kMiB) {
      SAY(spoiled(address, size, 0x5a));
      if (size % (2 * kMiB)) ask_behind(address + size);
      if (size % (2 * kMiB)) ask_behind(address + size + kMiB / 2);
      ask_for_dma_buf(address, size);
      SAY(CU(cuMemFree_v2)(address + 1));
      SAY(CU(cuMemFree_v2)(address + kMiB));
    }
    SAY(CU(cuMemFree_v2)(address));
    SAY(CU(cuMemFree_v2)(address));
    CUdeviceptr base = 0;
    SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, address));
  }
  SAY(CU(cuMemAlloc_v2)(nullptr, 4 * kMiB));
  SAY(CU(cuMemFree_v2)(0));
}

unsigned long long buffer_of(CUdeviceptr pointer) {
  unsigned long long id = 0;
  SAY(CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer));
  return id;
}

// Those that lie side by side, where they end, and what comes to the place of one.
void try_small_ones(CUcontext context) {
  std::printf("== small ones\n");
  CUdeviceptr all[4];
  for (auto& address : all)
    address = allocate(1000);
  std::set<unsigned long long> buffers;
  for (const auto address : all)
    buffers.insert(buffer_of(address));
  SAY(buffers.size());
  SAY(buffer_of(all[1]) == buffer_of(all[1] + 999));
  for (const auto address : {all[0], all[2]})
    SAY(CU(cuMemFree_v2)(address));
  for (const auto address : {all[1] + 1000, all[3] + 1023, all[2], all[2] + 500}) {
    ask_behind(address);
    const unsigned wanted = 1;
    SAY(CU(cuPointerSetAttribute)(&wanted, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address));
    CUipcMemHandle handle{};
    SAY(CU(cuIpcGetMemHandle)(&handle, address));
    SAY(CU(cuMemFree_v2)(address));
  }
  SAY(CU(cuMemFree_v2)(all[1] + 512));
  const auto again = allocate(1000);
  SAY(buffers.contains(buffer_of(again)));
  ask_about("again", again + 7, again, context);
  CUmemGenericAllocationHandle handle = 0;
  SAY(CU(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(again)));
  SAY(CU(cuMemUnmap)(all[1] / (2 * kMiB) * (2 * kMiB), 2 * kMiB));
  for (const auto address : {again, all[3], all[1]}) {
    SAY(spoiled(address, 1000, 0x3c));
    SAY(CU(cuMemFree_v2)(address));
  }
}

void try_pitch(CUcontext context) {
  for (const auto& [width, height, element] :
       {std::tuple<std::size_t, std::size_t, unsigned>{100, 10, 4},
        {1000, 4000, 4},
        {4097, 2000, 16},
        {3 * kMiB, 1, 8},
        {5 * kMiB + 12, 3, 4},
        {64 << 10, 100, 16},
        {1000, 0, 4},
        {0, 4000, 4},
        {1000, 4000, 3},
        {1000, SIZE_MAX / 4, 4}}) {
    std::printf("== pitch %zu x %zu, %u\n", width, height, element);
    CUdeviceptr address = 0;
    std::size_t pitch = 0;
    const auto result = CU(cuMemAllocPitch_v2)(&address, &pitch, width, height, element);
    SAY(result);
    if (result != CUDA_SUCCESS) continue;
    SAY(pitch);
    ask_about("of the last row", address + pitch * (height - 1), address, context);
    SAY(spoiled(address, pitch * height, 0x77));
    SAY(CU(cuMemFree_v2)(address));
  }
}

// All of it, until the driver has no more, and then it must be there again.
void try_out_of_memory() {
  std::printf("== out of memory\n");
  std::size_t free_before = 0;
  std::size_t total = 0;
  SAY(CU(cuMemGetInfo_v2)(&free_before, &total));
  std::vector<CUdeviceptr> all;
  CUdeviceptr address = 0;
  CUresult result = CUDA_SUCCESS;
  while ((result = CU(cuMemAlloc_v2)(&address, 32 * kMiB)) == CUDA_SUCCESS)
    all.push_back(address);
  SAY(result);
  SAY(all.size());
  SAY(CU(cuMemAlloc_v2)(&address, 32 * kMiB));
  for (const auto one : all)
    SAY(CU(cuMemFree_v2)(one));
  std::size_t free_after = 0;
  SAY(CU(cuMemGetInfo_v2)(&free_after, &total));
  SAY(free_before - free_after);
}

void try_contexts(CUcontext first, CUdevice device) {
  std::printf("== contexts\n");
  const auto of_first = allocate(4 * kMiB);
  CUcontext second = context_on(device);
  const auto of_second = allocate(4 * kMiB);
  ask_about("of the first, from the second", of_first, of_first, first);
  SAY(spoiled(of_first, 4 * kMiB, 1));
  SAY(CU(cuMemFree_v2)(of_first));
  CUcontext popped = nullptr;
  SAY(CU(cuCtxPopCurrent_v2)(&popped));
  SAY(popped == second);
  // From a thread that has no context.
  std::thread([&] {
    CUcontext none = nullptr;
    SAY(CU(cuCtxGetCurrent)(&none));
    SAY(none == nullptr);
    SAY(CU(cuMemFree_v2)(of_second));
    SAY(CU(cuCtxGetCurrent)(&none));
    SAY(none == nullptr);
    CUdeviceptr address = 0;
    SAY(CU(cuMemAlloc_v2)(&address, 4 * kMiB));
  }).join();
  // Destroyed with memory in it: that is gone, and room for others.
  SAY(CU(cuCtxPushCurrent_v2)(second));
  const auto left = allocate(64 * kMiB);
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  SAY(CU(cuCtxDestroy_v2)(second));
  SAY(CU(cuCtxSetCurrent)(first));
  SAY(CU(cuMemGetInfo_v2)(&before, &total));
  const auto again = allocate(64 * kMiB);
  SAY(spoiled(again, 64 * kMiB, 2));
  // Whether the address comes again at once is the driver's affair, and the agent's.
  SAY(left == again || CU(cuMemFree_v2)(left) == CUDA_ERROR_INVALID_VALUE);
  SAY(CU(cuMemFree_v2)(again));
  SAY(CU(cuMemGetInfo_v2)(&after, &total));
  SAY(before - after);
  // Which error depends on what has taken the place of what the driver knew of it.
  SAY(CU(cuCtxDestroy_v2)(second) != CUDA_SUCCESS);
}

void try_primary(CUcontext first, CUdevice device) {
  std::printf("== the primary context\n");
  for (const bool reset : {false, true}) {
    CUcontext primary = nullptr;
    SAY(CU(cuDevicePrimaryCtxRetain)(&primary, device));
    SAY(CU(cuCtxSetCurrent)(primary));
    const auto address = allocate(8 * kMiB);
    ask_about("in it", address, address, primary);
    if (reset)
      SAY(CU(cuDevicePrimaryCtxReset_v2)(device));
    else
      SAY(CU(cuDevicePrimaryCtxRelease_v2)(device));
    SAY(CU(cuCtxSetCurrent)(first));
    CUdeviceptr base = 0;
    SAY(CU(cuMemGetAddressRange_v2)(&base, nullptr, address));
    SAY(CU(cuMemFree_v2)(address));
    unsigned flags = 0;
    int active = 0;
    SAY(CU(cuDevicePrimaryCtxGetState)(device, &flags, &active));
    SAY(active);
    if (reset && active) SAY(CU(cuDevicePrimaryCtxRelease_v2)(device));
  }
}

void try_peers(CUcontext first) {
  std::printf("== peers\n");
  int count = 0;
  SAY(CU(cuDeviceGetCount)(&count));
  if (count < 2) return;
  SAY(CU(cuCtxSetCurrent)(first));
  const auto before = allocate(4 * kMiB);
  CUcontext other = context_on(1);
  const auto theirs = allocate(4 * kMiB);
  SAY(CU(cuCtxEnablePeerAccess)(first, 0));
  SAY(CU(cuCtxEnablePeerAccess)(other, 0));
  SAY(CU(cuCtxSetCurrent)(first));
  const auto after = allocate(4 * kMiB);
  SAY(CU(cuCtxSetCurrent)(other));
  for (const auto address : {before, after}) {
    SAY(spoiled(address, 4 * kMiB, 3));
    SAY(CU(cuMemcpyDtoD_v2)(theirs, address, 4 * kMiB));
    SAY(CU(cuMemcpyPeer)(address, first, theirs, other, 4 * kMiB));
    ask_about("a peer's", address, address, first);
    SAY(CU(cuMemFree_v2)(address));
  }
  SAY(CU(cuMemFree_v2)(theirs));
  SAY(CU(cuCtxDestroy_v2)(other));
  SAY(CU(cuCtxSetCurrent)(first));
}

void try_streams() {
  std::printf("== streams and threads\n");
  CUstream stream = nullptr;
  SAY(CU(cuStreamCreate)(&stream, 0));
  const auto plain = allocate(4 * kMiB);
  SAY(CU(cuMemsetD8Async)(plain, 9, 4 * kMiB, stream));
  SAY(CU(cuMemFreeAsync)(plain, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  SAY(CU(cuMemFree_v2)(plain));
  CUdeviceptr pooled = 0;
  SAY(CU(cuMemAllocAsync)(&pooled, 4 * kMiB, stream));
  SAY(CU(cuMemsetD8Async)(pooled, 9, 4 * kMiB, stream));
  SAY(CU(cuMemFreeAsync)(pooled, stream));
  SAY(CU(cuStreamSynchronize)(stream));
  CUcontext context = nullptr;
  SAY(CU(cuCtxGetCurrent)(&context));
  // Each thread allocates and ends; the memory outlives it.
  std::vector<CUdeviceptr> all(16);
  for (auto& address : all) {
    std::thread([&] {
      CU(cuCtxSetCurrent)(context);
      CU(cuMemAlloc_v2)(&address, 3 * kMiB);
    }).join();
  }
  for (std::size_t i = 0; i < all.size(); ++i)
    SAY(spoiled(all[i], 3 * kMiB, static_cast<unsigned char>(i)));
  for (const auto address : all)
    SAY(CU(cuMemFree_v2)(address));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

// To free waits until nothing is under way that might use the memory; to allocate waits for
// nothing.
void try_free_in_flight() {
  std::printf("== frees while work is in flight\n");
  CUstream stream = nullptr;
  SAY(CU(cuStreamCreate)(&stream, 0));
  const auto used = allocate(4 * kMiB);
  const auto other = allocate(4 * kMiB);
  SAY(CU(cuLaunchHostFunc)(
      stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }, nullptr));
  SAY(CU(cuMemsetD8Async)(used, 9, 4 * kMiB, stream));
  SAY(CU(cuStreamQuery)(stream));
  CUdeviceptr pitched = 0;
  std::size_t pitch = 0;
  SAY(CU(cuMemAllocPitch_v2)(&pitched, &pitch, 4000, 1000, 4));
  const auto more = allocate(4 * kMiB);
  SAY(CU(cuStreamQuery)(stream));
  SAY(CU(cuMemFree_v2)(other));
  SAY(CU(cuStreamQuery)(stream));
  SAY(CU(cuMemFree_v2)(used));
  SAY(CU(cuMemFree_v2)(more));
  SAY(CU(cuMemFree_v2)(pitched));
  SAY(CU(cuStreamDestroy_v2)(stream));
}

// What a program does that looks for an error the way the manual has it.
void try_dlsym() {
  std::printf("== dlsym\n");
  void* library = driver_library();
  ::dlerror();
  void* found = ::dlsym(library, "cuMemAlloc_v2");
  SAY(found != nullptr);
  SAY(::dlerror() == nullptr);
  SAY(::dlsym(library, "cuNoSuchCall") == nullptr);
  SAY(::dlerror() != nullptr);
  SAY(::dlsym(library, "cuMemcpyNoSuchCall_v2") == nullptr);
  SAY(::dlerror() != nullptr);
  errno = 4711;
  SAY(::dlsym(library, "cuMemFree_v2") != nullptr);
  SAY(errno);
  SAY(::dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == nullptr);  // opened for itself alone
  SAY(::dlsym(RTLD_NEXT, "malloc") != nullptr);
  SAY(::dlsym(RTLD_DEFAULT, "no_such_name") == nullptr);
  void* by_name = nullptr;
  SAY(CU(cuGetProcAddress_v2)("cuMemAlloc", &by_name, 12000, 0, nullptr));
  SAY(by_name == found);
  SAY(CU(cuGetProcAddress_v2)("cuNoSuchCall", &by_name, 12000, 0, nullptr));
  SAY(CU(cuGetProcAddress_v2)("cuGetProcAddress", &by_name, 12000, 0, nullptr));
  SAY(by_name == ::dlsym(library, "cuGetProcAddress_v2"));
}

}  // namespace
}  // namespace stasis::agent_test

int main(int argc, char** argv) {
  using namespace stasis::agent_test;  // NOLINT(google-build-using-namespace)
  using namespace stasis::cuda;        // NOLINT(google-build-using-namespace)
  // What was said last tells where a driver ended the program.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc == 4 && std::string(argv[1]) == "ipc-child") {
    be_ipc_child(argv[2], argv[3]);
    return 0;
  }
  if (argc == 2) {
    SAY(CU(cuInit)(0));
    CUcontext context = nullptr;
    SAY(CU(cuCtxCreate_v2)(&context, 0, 0));
    if (std::string(argv[1]) == "pools") try_pools(context);
    if (std::string(argv[1]) == "managed") try_managed(context);
    if (std::string(argv[1]) == "pool-in-use") be_pool_in_use();
    return 0;
  }
  try_dlsym();
  // CUDA in the child alone, and the parent uses it afterwards.
  const pid_t child = ::fork();
  int status = -1;
  if (child != 0) ::waitpid(child, &status, 0);
  SAY(CU(cuInit)(0));
  CUcontext context = nullptr;
  SAY(CU(cuCtxCreate_v2)(&context, 0, 0));
  CUdeviceptr address = 0;
  SAY(CU(cuMemAlloc_v2)(&address, 4 * kMiB));
  SAY(CU(cuMemFree_v2)(address));
  if (child == 0) ::_exit(0);
  SAY(status);
  try_allocations(context);
  try_small_ones(context);
  try_pitch(context);
  try_out_of_memory();
  try_contexts(context, 0);
  try_primary(context, 0);
  try_peers(context);
  try_streams();
  try_free_in_flight();
  try_vmm();
  try_ipc();
  try_managed(context);
  try_pools(context);
  SAY(CU(cuCtxDestroy_v2)(context));
}
