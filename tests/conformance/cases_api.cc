// Cases about the plain API: arguments, codes, what memory and modules are.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "api.h"
#include "kernels.h"
#include "report.h"

namespace stasis::conformance {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

constexpr std::size_t kMiB = 1 << 20;

CUcontext start() {
  CUcontext context = nullptr;
  api().cuInit(0);
  api().cuDevicePrimaryCtxRetain(&context, 0);
  api().cuCtxSetCurrent(context);
  return context;
}

void before_init(Report& r) {
  int n = 0;
  CUcontext context;
  CUprocessState state;
  CUdeviceptr address;
  r.note("version", api().cuDriverGetVersion(&n));
  r.note("own_state", api().cuCheckpointProcessGetState(::getpid(), &state));
  r.note("count", api().cuDeviceGetCount(&n));
  r.note("device", api().cuDeviceGet(&n, 0));
  r.note("current", api().cuCtxGetCurrent(&context));
  r.note("alloc", api().cuMemAlloc_v2(&address, 4096));
  r.note("flags", api().cuInit(1));
  r.note("init", api().cuInit(0));
  r.note("init_again", api().cuInit(0));
  r.note("own_state_after", api().cuCheckpointProcessGetState(::getpid(), &state));
  r.note("no_context_alloc", api().cuMemAlloc_v2(&address, 4096));
  r.note("no_context_sync", api().cuCtxSynchronize());
  r.note("no_context_device", api().cuCtxGetDevice(&n));
}

void devices(Report& r) {
  api().cuInit(0);
  int count = 0;
  int n = 0;
  std::size_t size = 0;
  char name[64] = {};
  CUuuid uuid;
  r.note("count_null", api().cuDeviceGetCount(nullptr));
  r.note("count", api().cuDeviceGetCount(&count));
  r.note("null", api().cuDeviceGet(nullptr, 0));
  r.note("negative", api().cuDeviceGet(&n, -1));
  r.note("beyond", api().cuDeviceGet(&n, count));
  r.note("name_beyond", api().cuDeviceGetName(name, sizeof name, count));
  r.note("name_null", api().cuDeviceGetName(nullptr, 8, 0));
  r.note("uuid_null", api().cuDeviceGetUuid_v2(nullptr, 0));
  r.note("uuid_beyond", api().cuDeviceGetUuid_v2(&uuid, count));
  r.note("memory_null", api().cuDeviceTotalMem_v2(nullptr, 0));
  r.note("memory_beyond", api().cuDeviceTotalMem_v2(&size, count));
  r.note("warp", api().cuDeviceGetAttribute(&n, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0));
  r.note("warp_size", n);
  r.note("attribute_unknown",
         api().cuDeviceGetAttribute(&n, static_cast<CUdevice_attribute>(9999), 0));
  r.note("attribute_beyond", api().cuDeviceGetAttribute(&n, CU_DEVICE_ATTRIBUTE_WARP_SIZE, count));
  r.note("pci", api().cuDeviceGetPCIBusId(name, sizeof name, 0));
  r.note("by_pci", api().cuDeviceGetByPCIBusId(&n, name));
  r.note("by_pci_device", n);
  r.note("by_pci_unknown", api().cuDeviceGetByPCIBusId(&n, "0000:fe:00.0"));
  r.note("vmm", api().cuDeviceGetAttribute(
                    &n, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
  r.note("vmm_supported", n);
}

void contexts(Report& r) {
  api().cuInit(0);
  unsigned flags = 0;
  int active = -1;
  CUcontext primary = nullptr;
  CUcontext current = nullptr;
  CUcontext own = nullptr;
  r.note("release_unretained", api().cuDevicePrimaryCtxRelease_v2(0));
  r.note("state", api().cuDevicePrimaryCtxGetState(0, &flags, &active));
  r.note("active_before", active);
  r.note("retain", api().cuDevicePrimaryCtxRetain(&primary, 0));
  r.note("retain_beyond", api().cuDevicePrimaryCtxRetain(&current, 1000));
  api().cuDevicePrimaryCtxGetState(0, &flags, &active);
  r.note("active_after", active);
  r.note("none_current", api().cuCtxGetCurrent(&current));
  r.yes_no("none_is_null", current == nullptr);
  r.note("pop_empty", api().cuCtxPopCurrent_v2(&current));
  r.note("set", api().cuCtxSetCurrent(primary));
  r.note("create", api().cuCtxCreate_v2(&own, 0, 0));
  api().cuCtxGetCurrent(&current);
  r.yes_no("created_is_current", current == own);
  r.note("pop", api().cuCtxPopCurrent_v2(&current));
  api().cuCtxGetCurrent(&current);
  r.yes_no("primary_again", current == primary);
  r.note("push", api().cuCtxPushCurrent_v2(own));
  r.note("destroy", api().cuCtxDestroy_v2(own));
  api().cuCtxGetCurrent(&current);
  r.yes_no("primary_after_destroy", current == primary);
  r.note("destroy_null", api().cuCtxDestroy_v2(nullptr));
  r.note("release", api().cuDevicePrimaryCtxRelease_v2(0));
  api().cuDevicePrimaryCtxGetState(0, &flags, &active);
  r.note("active_released", active);
}

void memory_codes(Report& r) {
  start();
  CUdeviceptr a = 0;
  CUdeviceptr base = 0;
  std::size_t size = 0;
  std::size_t pitch = 0;
  std::vector<char> host(4 * kMiB);
  r.note("alloc_null", api().cuMemAlloc_v2(nullptr, 16));
  r.note("alloc_zero", api().cuMemAlloc_v2(&a, 0));
  r.note("alloc_too_much", api().cuMemAlloc_v2(&a, std::size_t{1} << 50));
  r.note("alloc", api().cuMemAlloc_v2(&a, 4 * kMiB));
  r.note("copy_beyond_in", api().cuMemcpyHtoD_v2(a + (std::size_t{1} << 40), host.data(), 16));
  r.note("copy_beyond_out", api().cuMemcpyDtoH_v2(host.data(), a + (std::size_t{1} << 40), 16));
  r.note("copy_null", api().cuMemcpyHtoD_v2(0, host.data(), 16));
  r.note("copy_from_null", api().cuMemcpyHtoD_v2(a, nullptr, 16));
  r.note("copy_nothing", api().cuMemcpyHtoD_v2(a, host.data(), 0));
  r.note("memset_beyond", api().cuMemsetD8_v2(a + (std::size_t{1} << 40), 1, 16));
  r.note("memset_misaligned", api().cuMemsetD32_v2(a + 2, 1, 4));
  r.note("range", api().cuMemGetAddressRange_v2(&base, &size, a + kMiB));
  r.yes_no("range_base", base == a);
  r.yes_no("range_size", size == 4 * kMiB);
  r.note("range_unknown", api().cuMemGetAddressRange_v2(&base, &size, 4096));
  r.note("pitch", api().cuMemAllocPitch_v2(&base, &pitch, 1000, 10, 4));
  r.yes_no("pitch_padded", pitch >= 1000 && pitch % 32 == 0);
  r.note("pitch_element", api().cuMemAllocPitch_v2(&base, &pitch, 1000, 10, 3));
  r.note("free_inside", api().cuMemFree_v2(a + 4096));
  r.note("free", api().cuMemFree_v2(a));
  r.note("free_again", api().cuMemFree_v2(a));
  r.note("free_null", api().cuMemFree_v2(0));
  r.note("free_unknown", api().cuMemFree_v2(4096));
  r.note("info_null", api().cuMemGetInfo_v2(nullptr, &size));
  r.note("managed_flags", api().cuMemAllocManaged(&a, 4096, 0));
}

void host_memory(Report& r) {
  start();
  void* pinned = nullptr;
  CUdeviceptr device = 0;
  unsigned type = 0;
  char* plain = static_cast<char*>(
      ::mmap(nullptr, 4 * kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const auto address = reinterpret_cast<CUdeviceptr>(plain);
  r.note("alloc_null", api().cuMemAllocHost_v2(nullptr, 16));
  r.note("alloc_zero", api().cuMemAllocHost_v2(&pinned, 0));
  r.note("alloc", api().cuMemHostAlloc(&pinned, kMiB, kMemHostAllocDeviceMap));
  void* refused = nullptr;
  r.note("alloc_flags", api().cuMemHostAlloc(&refused, kMiB, 0x100));
  r.note("pointer", api().cuMemHostGetDevicePointer_v2(&device, pinned, 0));
  r.yes_no("same_address", device == reinterpret_cast<CUdeviceptr>(pinned));
  r.note("pointer_plain", api().cuMemHostGetDevicePointer_v2(&device, plain, 0));
  r.note("attribute", api().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                  reinterpret_cast<CUdeviceptr>(pinned)));
  r.note("attribute_type", type);
  r.note("attribute_plain",
         api().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address));
  r.note("register", api().cuMemHostRegister_v2(plain, 4 * kMiB, 0));
  r.note("register_again", api().cuMemHostRegister_v2(plain, 4 * kMiB, 0));
  r.note("register_part", api().cuMemHostRegister_v2(plain + 4096, 4096, 0));
  r.note("register_null", api().cuMemHostRegister_v2(nullptr, 4096, 0));
  r.note("register_zero", api().cuMemHostRegister_v2(plain, 0, 0));
  r.note("unregister_inside", api().cuMemHostUnregister(plain + 4096));
  r.note("unregister", api().cuMemHostUnregister(plain));
  r.note("unregister_again", api().cuMemHostUnregister(plain));
  r.note("free_plain", api().cuMemFreeHost(plain));
  r.note("free", api().cuMemFreeHost(pinned));
  r.note("free_again", api().cuMemFreeHost(pinned));
}

void module_codes(Report& r) {
  start();
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CUdeviceptr address = 0;
  std::size_t size = 0;
  r.note("load_null", api().cuModuleLoadData(&module, nullptr));
  r.note("load_garbage", api().cuModuleLoadData(&module, "this is no image at all"));
  r.note("load", api().cuModuleLoadData(&module, kPtx));
  r.note("function_null", api().cuModuleGetFunction(&function, module, nullptr));
  r.note("function_unknown", api().cuModuleGetFunction(&function, module, "no_such_kernel"));
  r.note("function", api().cuModuleGetFunction(&function, module, "increment"));
  r.note("global_unknown", api().cuModuleGetGlobal_v2(&address, &size, module, "no_such_thing"));
  unsigned words = 0;
  void* params[] = {&address, &words};
  auto launch = [&](unsigned grid, unsigned block, void** p) {
    return api().cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, nullptr, p, nullptr);
  };
  r.note("launch", launch(1, 32, params));
  r.note("launch_no_grid", launch(0, 32, params));
  r.note("launch_no_block", launch(1, 0, params));
  r.note("launch_big_block", launch(1, 2048, params));
  r.note("launch_no_params", launch(1, 32, nullptr));
  r.note("sync", api().cuCtxSynchronize());
  r.note("unload", api().cuModuleUnload(module));
}

void proc_address(Report& r) {
  void* function = nullptr;
  CUdriverProcAddressQueryResult status;
  auto ask = [&](const char* key, const char* name, int version) {
    status = static_cast<CUdriverProcAddressQueryResult>(77);
    function = nullptr;
    r.note(key, api().cuGetProcAddress_v2(name, &function, version, 0, &status));
    r.note(std::string(key) + "_status", status);
    r.yes_no(std::string(key) + "_found", function != nullptr);
  };
  ask("init", "cuInit", 12000);
  ask("unknown", "cuNoSuchFunction", 12000);
  ask("too_old", "cuMemAllocAsync", 10000);
  ask("suffixed", "cuMemAlloc_v2", 12000);
  ask("checkpoint", "cuCheckpointProcessLock", 12080);
  ask("checkpoint_too_old", "cuCheckpointProcessLock", 12000);
  ask("alloc", "cuMemAlloc", 12000);
  r.yes_no("alloc_is_v2", function == reinterpret_cast<void*>(api().cuMemAlloc_v2));
  const char* text = nullptr;
  r.note("name", api().cuGetErrorName(CUDA_ERROR_NOT_READY, &text));
  r.yes_no("name_text", text && !std::strcmp(text, "CUDA_ERROR_NOT_READY"));
  r.note("name_unknown", api().cuGetErrorName(static_cast<CUresult>(12345), &text));
  r.yes_no("name_unknown_null", text == nullptr);
}

void memory_content(Report& r) {
  start();
  constexpr unsigned kWords = 1 << 18;
  CUdeviceptr a = 0;
  CUdeviceptr b = 0;
  api().cuMemAlloc_v2(&a, kWords * 4);
  api().cuMemAlloc_v2(&b, kWords * 4);
  std::vector<unsigned> host(kWords);
  auto all = [&](unsigned value) {
    api().cuMemcpyDtoH_v2(host.data(), b, kWords * 4);
    for (unsigned word : host) {
      if (word != value) return false;
    }
    return true;
  };
  r.note("set32", api().cuMemsetD32_v2(a, 0x12345678, kWords));
  r.note("copy", api().cuMemcpyDtoD_v2(b, a, kWords * 4));
  r.yes_no("copied32", all(0x12345678));
  r.note("set16", api().cuMemsetD16_v2(b, 0xabcd, kWords * 2));
  r.yes_no("filled16", all(0xabcdabcd));
  r.note("set8", api().cuMemsetD8_v2(b, 0x5a, kWords * 4));
  r.yes_no("filled8", all(0x5a5a5a5a));
  CUDA_MEMCPY2D c{};
  c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  c.srcDevice = a;
  c.srcPitch = 1024;
  c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  c.dstDevice = b;
  c.dstPitch = 2048;
  c.dstXInBytes = 256;
  c.dstY = 3;
  c.WidthInBytes = 512;
  c.Height = 10;
  r.note("copy2d", api().cuMemcpy2D_v2(&c));
  api().cuMemcpyDtoH_v2(host.data(), b, kWords * 4);
  long changed = 0;
  bool in_place = true;
  for (unsigned i = 0; i < kWords; ++i) {
    if (host[i] == 0x5a5a5a5a) continue;
    ++changed;
    const unsigned row = i * 4 / 2048;
    const unsigned column = i * 4 % 2048;
    if (row < 3 || row >= 13 || column < 256 || column >= 768) in_place = false;
  }
  r.note("changed2d", changed);
  r.yes_no("in_place2d", in_place);
  c.dstPitch = 100;
  r.note("copy2d_pitch", api().cuMemcpy2D_v2(&c));
  r.note("copy2d_null", api().cuMemcpy2D_v2(nullptr));
}

void vmm(Report& r) {
  start();
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  std::size_t granularity = 0;
  r.note("granularity", api().cuMemGetAllocationGranularity(&granularity, &prop,
                                                            CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  r.note("granularity_value", static_cast<long>(granularity));
  const auto g = granularity;
  CUdeviceptr at = 0;
  CUdeviceptr other = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUmemGenericAllocationHandle exportable = 0;
  CUmemGenericAllocationHandle again = 0;
  CUmemAllocationProp seen{};
  int fd = -1;
  unsigned long long flags = 0;
  unsigned value = 0;
  const CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  r.note("reserve_odd", api().cuMemAddressReserve(&at, g + 4096, 0, 0, 0));
  r.note("reserve_zero", api().cuMemAddressReserve(&at, 0, 0, 0, 0));
  r.note("reserve", api().cuMemAddressReserve(&at, 4 * g, 0, 0, 0));
  r.note("create_odd", api().cuMemCreate(&handle, g + 1, &prop, 0));
  r.note("create_zero", api().cuMemCreate(&handle, 0, &prop, 0));
  r.note("create_no_prop", api().cuMemCreate(&handle, g, nullptr, 0));
  r.note("create_too_much", api().cuMemCreate(&handle, std::size_t{1} << 50, &prop, 0));
  prop.location.id = 1000;
  r.note("create_beyond", api().cuMemCreate(&handle, g, &prop, 0));
  prop.location.id = 0;
  r.note("create", api().cuMemCreate(&handle, g, &prop, 0));
  r.note("export_private", api().cuMemExportToShareableHandle(
                               &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  r.note("create_exportable", api().cuMemCreate(&exportable, g, &prop, 0));
  r.note("export", api().cuMemExportToShareableHandle(&fd, exportable,
                                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  r.yes_no("export_is_fd", fd >= 0);
  r.note("import_own",
         api().cuMemImportFromShareableHandle(&again, reinterpret_cast<void*>(std::intptr_t{fd}),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  r.note("release_import", api().cuMemRelease(again));
  r.note("map_offset", api().cuMemMap(at, g, g, handle, 0));
  r.note("map_too_big", api().cuMemMap(at, 2 * g, 0, handle, 0));
  r.note("map", api().cuMemMap(at, g, 0, handle, 0));
  r.note("map_over", api().cuMemMap(at, g, 0, exportable, 0));
  r.note("map_second", api().cuMemMap(at + g, g, 0, exportable, 0));
  r.note("access_unmapped", api().cuMemSetAccess(at + 2 * g, g, &access, 1));
  r.note("access_none", api().cuMemSetAccess(at, g, nullptr, 1));
  r.note("access", api().cuMemSetAccess(at, 2 * g, &access, 1));
  r.note("access_get", api().cuMemGetAccess(&flags, &prop.location, at));
  r.note("access_flags", static_cast<long>(flags));
  r.note("memset_across", api().cuMemsetD32_v2(at, 7, 2 * g / 4));
  r.note("read", api().cuMemcpyDtoH_v2(&value, at + g + 4, 4));
  r.note("read_value", value);
  r.note("retain", api().cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(at + 4096)));
  r.yes_no("retain_same", again == handle);
  r.note("properties", api().cuMemGetAllocationPropertiesFromHandle(&seen, exportable));
  r.note("properties_types", seen.requestedHandleTypes);
  r.note("release", api().cuMemRelease(handle));
  r.note("release_retained", api().cuMemRelease(again));
  r.note("still_mapped", api().cuMemcpyDtoH_v2(&value, at, 4));
  r.note("reserve_more", api().cuMemAddressReserve(&other, 2 * g, 0, 0, 0));
  r.note("free_other", api().cuMemAddressFree(other, 2 * g));
  r.note("unmap_nothing", api().cuMemUnmap(at + 2 * g, g));
  r.note("unmap_both", api().cuMemUnmap(at, 2 * g));
  r.note("free_part", api().cuMemAddressFree(at, g));
  r.note("free", api().cuMemAddressFree(at, 4 * g));
  r.note("import_no_memory",
         api().cuMemImportFromShareableHandle(&again, reinterpret_cast<void*>(std::intptr_t{0}),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  ::close(fd);
}

// A child of fork has no CUDA; its codes come back through its exit status.
void fork_child(Report& r) {
  start();
  auto in_child = [&](const char* key, auto&& call) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::alarm(10);
      ::_exit(static_cast<int>(call()));
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    r.note(key, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  };
  in_child("init", [] { return api().cuInit(0); });
  in_child("count", [] {
    int n;
    return api().cuDeviceGetCount(&n);
  });
  in_child("info", [] {
    std::size_t a;
    std::size_t b;
    return api().cuMemGetInfo_v2(&a, &b);
  });
  in_child("sync", [] { return api().cuCtxSynchronize(); });
  in_child("state", [] {
    CUprocessState state;
    return api().cuCheckpointProcessGetState(::getpid(), &state);
  });
  r.note("parent_goes_on", api().cuCtxSynchronize());
}

}  // namespace

std::vector<Case> api_cases() {
  return {
      {"before_init", "what answers before cuInit, and after it without a context", before_init},
      {"devices", "devices: bad ordinals, null pointers, PCI addresses", devices},
      {"contexts", "primary and own contexts, the stack of current ones", contexts},
      {"memory_codes", "device memory: codes for bad sizes, pointers and ranges", memory_codes},
      {"host_memory", "pinned and registered host memory", host_memory},
      {"module_codes", "modules, functions and launches: codes", module_codes},
      {"proc_address", "cuGetProcAddress by version; names of errors", proc_address},
      {"memory_content", "memsets and copies, also two-dimensional, do what they say",
       memory_content},
      {"vmm", "reserve, create, map, access, unmap, release, export and import as fd", vmm},
      {"fork_child", "a forked child has no CUDA, and its parent goes on", fork_child},
  };
}

}  // namespace stasis::conformance
