// Managed memory as the program allocates it, and what it says of it.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "activation.h"
#include "agent.h"
#include "driver_mmap.h"
#include "eviction_internal.h"
#include "gate.h"
#include "intercept.h"
#include "managed.h"
#include "pages.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// An address that is free now, for two areas of the driver's.
std::uintptr_t free_area() {
  const std::size_t room = 2 * kManagedArea;
  void* raw = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return 0;
  ::munmap(raw, room);
  const auto from = reinterpret_cast<std::uintptr_t>(raw);
  return (from + kManagedArea - 1) / kManagedArea * kManagedArea;
}

enum Steering { kUnknown, kYes, kNo };
std::atomic<int> g_steering{kUnknown};

// Whether this driver can be brought to allocate where it is wanted: tried once in a process, with
// a piece of an area that nothing ever touches.
bool can_be_steered() {
  // Its mmap() is not the agent's where that came later.
  if (is_attached()) return false;
  // Another thread may take the address in between, also one that tries as well; and a failure of
  // the driver's says nothing of it.
  for (int attempt = 0; attempt < 5; ++attempt) {
    const int answer = g_steering.load(std::memory_order_relaxed);
    if (answer != kUnknown) return answer == kYes;
    const std::uintptr_t address = free_area();
    if (address == 0) break;
    CUdeviceptr got = 0;
    CUresult result;
    bool used;
    {
      const SteeredMapping steered(address, kManagedArea);
      result = driver().cuMemAllocManaged(&got, kManagedArea, CU_MEM_ATTACH_GLOBAL);
      used = steered.used();
    }
    if (result != CUDA_SUCCESS) continue;
    driver().cuMemFree_v2(got);
    if (got == address)
      g_steering.store(kYes, std::memory_order_relaxed);
    else if (int unknown = kUnknown; attempt == 4 || used)
      g_steering.compare_exchange_strong(unknown, kNo, std::memory_order_relaxed);
  }
  return g_steering.load(std::memory_order_relaxed) == kYes;
}

// While a stream is captured nothing is tried: the driver is called as the program calls it.
bool is_no_time_to_try() {
  return tables().captures.load(std::memory_order_relaxed) != 0 &&
         g_steering.load(std::memory_order_relaxed) != kYes;
}

// Each is a mapping of its own, of which a process may have 65530 (vm.max_map_count).
constexpr std::size_t kMostPieces = 8192;

bool has_many_pieces() {
  const TablesLock lock;
  return tables().managed.size() >= kMostPieces;
}

// Whether the processor may touch managed memory while the current device works: the agent copies
// by both at once.
bool is_concurrent() {
  CUdevice device = 0;
  int concurrent = 0;
  return driver().cuCtxGetDevice(&device) == CUDA_SUCCESS &&
         driver().cuDeviceGetAttribute(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
                                       device) == CUDA_SUCCESS &&
         concurrent != 0;
}

// 0 if it could not be had this way.
CUdeviceptr allocate_alone(CUcontext context, std::size_t asked, unsigned flags) {
  if (asked == 0 || asked > (std::size_t{1} << 46) || has_many_pieces()) return 0;
  const std::size_t size = (asked + kManagedArea - 1) / kManagedArea * kManagedArea;
  CUdeviceptr address = 0;
  if (driver().cuMemAllocManaged(&address, size, flags) != CUDA_SUCCESS) return 0;
  if (address % kManagedArea != 0 || !can_be_steered()) {
    driver().cuMemFree_v2(address);
    return 0;
  }
  const TablesLock lock;
  Managed managed;
  managed.asked = asked;
  managed.size = size;
  managed.context = owner_in(context);
  managed.flags = flags;
  // Now, as save_managed() should take no memory from the program's heap.
  managed.on_cpu.assign((asked + kManagedBlock - 1) / kManagedBlock, false);
  tables().managed.insert_or_assign(address, std::move(managed));
  return address;
}

// More than was asked for, of which the driver knows: it would say so.
bool reaches_behind(CUdeviceptr pointer, std::size_t bytes) {
  const TablesLock lock;
  const auto at = managed_at(pointer);
  if (at == tables().managed.end()) return false;
  const std::size_t end = (at->second.asked + kPage - 1) / kPage * kPage;
  return bytes > end || pointer - at->first > end - bytes;
}

void note(const Hint& hint) {
  const TablesLock lock;
  const auto at = managed_at(hint.address);
  if (at != tables().managed.end()) at->second.hints.add(hint);
}

}  // namespace

void forget_stream(CUstream stream) {
  const TablesLock lock;
  for (auto& [address, managed] : tables().managed)
    managed.hints.forget([&](const Hint& hint) {
      return hint.kind == Hint::Kind::kAttach && hint.stream == stream;
    });
}

namespace hooks {

CUresult cuMemAllocManaged(CUdeviceptr* pointer, std::size_t bytes, unsigned flags) {
  const Gate::Pass pass;
  CUcontext context = nullptr;
  if (!pointer || is_inactive() || driver().cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context ||
      is_no_time_to_try() || !is_concurrent())
    return driver().cuMemAllocManaged(pointer, bytes, flags);
  if (const auto address = allocate_alone(context, bytes, flags)) {
    *pointer = address;
    Agent::start_with_managed();
    return CUDA_SUCCESS;
  }
  // Whatever the reason, the program gets the driver's own answer.
  return driver().cuMemAllocManaged(pointer, bytes, flags);
}

CUresult cuMemAdvise(CUdeviceptr pointer, std::size_t bytes, CUmem_advise advice, CUdevice device) {
  const Gate::Pass pass;
  if (reaches_behind(pointer, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = driver().cuMemAdvise(pointer, bytes, advice, device);
  if (result == CUDA_SUCCESS)
    note({Hint::Kind::kAdvice, pointer, bytes, advice, static_cast<std::uint64_t>(device), false,
          nullptr, nullptr});
  return result;
}

CUresult cuMemAdvise_v2(CUdeviceptr pointer, std::size_t bytes, CUmem_advise advice,
                        std::uint64_t location) {
  const Gate::Pass pass;
  if (reaches_behind(pointer, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = driver().cuMemAdvise_v2(pointer, bytes, advice, location);
  if (result == CUDA_SUCCESS)
    note({Hint::Kind::kAdvice, pointer, bytes, advice, location, true, nullptr, nullptr});
  return result;
}

namespace {

template <class Call>
CUresult prefetch(Call* call, CUdeviceptr pointer, std::size_t bytes, CUdevice device,
                  CUstream stream) {
  const Gate::Pass pass;
  if (reaches_behind(pointer, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = call(pointer, bytes, device, stream);
  if (result == CUDA_SUCCESS)
    note({Hint::Kind::kPrefetch, pointer, bytes, 0, static_cast<std::uint64_t>(device), false,
          nullptr, nullptr});
  return result;
}

template <class Call>
CUresult prefetch(Call* call, CUdeviceptr pointer, std::size_t bytes, std::uint64_t location,
                  unsigned flags, CUstream stream) {
  const Gate::Pass pass;
  if (reaches_behind(pointer, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto result = call(pointer, bytes, location, flags, stream);
  if (result == CUDA_SUCCESS)
    note({Hint::Kind::kPrefetch, pointer, bytes, flags, location, true, nullptr, nullptr});
  return result;
}

}  // namespace

CUresult cuMemPrefetchAsync(CUdeviceptr pointer, std::size_t bytes, CUdevice device,
                            CUstream stream) {
  return prefetch(driver().cuMemPrefetchAsync, pointer, bytes, device, stream);
}
CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr pointer, std::size_t bytes, CUdevice device,
                                 CUstream stream) {
  return prefetch(driver().cuMemPrefetchAsync_ptsz, pointer, bytes, device, stream);
}
CUresult cuMemPrefetchAsync_v2(CUdeviceptr pointer, std::size_t bytes, std::uint64_t location,
                               unsigned flags, CUstream stream) {
  return prefetch(driver().cuMemPrefetchAsync_v2, pointer, bytes, location, flags, stream);
}
CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr pointer, std::size_t bytes, std::uint64_t location,
                                    unsigned flags, CUstream stream) {
  return prefetch(driver().cuMemPrefetchAsync_v2_ptsz, pointer, bytes, location, flags, stream);
}

namespace {

template <class Call>
CUresult attach(Call* call, CUstream stream, CUdeviceptr pointer, std::size_t bytes,
                unsigned flags) {
  const Gate::Pass pass;
  // All of it: the driver knows that by the size that it has given.
  std::size_t whole = bytes;
  {
    const TablesLock lock;
    const auto at = managed_at(pointer);
    if (at != tables().managed.end() && at->first == pointer &&
        (bytes == 0 || bytes == at->second.asked))
      whole = at->second.size;
  }
  const auto result = call(stream, pointer, whole, flags);
  if (result == CUDA_SUCCESS)
    note({Hint::Kind::kAttach, pointer, whole, flags, 0, false, stream, context_of(stream)});
  return result;
}

}  // namespace

CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr pointer, std::size_t bytes,
                                unsigned flags) {
  return attach(driver().cuStreamAttachMemAsync, stream, pointer, bytes, flags);
}

CUresult cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr pointer, std::size_t bytes,
                                     unsigned flags) {
  return attach(driver().cuStreamAttachMemAsync_ptsz, stream, pointer, bytes, flags);
}

}  // namespace hooks
}  // namespace stasis::preload
