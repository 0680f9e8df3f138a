#include "managed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "copiers.h"
#include "driver_mmap.h"
#include "eviction_internal.h"
#include "intercept.h"
#include "pages.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::size_t kBlock = kManagedBlock;

std::byte* pointer(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

bool is_zero(const std::byte* bytes, std::size_t count) {
  return bytes[0] == std::byte{0} && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

// Which pages of this process are there, as the kernel tells.
class Pagemap {
 public:
  Pagemap() : fd_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}
  ~Pagemap() {
    if (fd_ >= 0) ::close(fd_);
  }
  Pagemap(const Pagemap&) = delete;
  Pagemap& operator=(const Pagemap&) = delete;

  // Whether any page of the block is in memory or in swap. Where that is not known, all are.
  bool any(const std::byte* block, std::size_t bytes) const {
    constexpr std::uint64_t kPresentOrSwapped = std::uint64_t{3} << 62;
    std::array<std::uint64_t, kBlock / kPage> entries{};
    const std::size_t count = (bytes + kPage - 1) / kPage;
    const auto wanted = static_cast<ssize_t>(count * sizeof entries[0]);
    const auto at =
        static_cast<off_t>(reinterpret_cast<std::uintptr_t>(block) / kPage * sizeof entries[0]);
    if (fd_ < 0 || ::pread(fd_, entries.data(), count * sizeof entries[0], at) != wanted)
      return true;
    return std::any_of(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(count),
                       [](std::uint64_t entry) { return (entry & kPresentOrSwapped) != 0; });
  }

 private:
  const int fd_;
};

// Of what has less than a block a large page would take 512 times what is needed: 1,000 pieces of
// 4 KiB took 2 GiB.
bool takes_large_pages(const Managed& managed) { return managed.asked >= kBlock; }

std::byte* map_content(const Managed& managed) {
  void* at = ::mmap(nullptr, managed.size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  // All of it alike, as mremap() moves one mapping.
  ::madvise(at, managed.size, takes_large_pages(managed) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return static_cast<std::byte*>(at);
}

std::size_t blocks_of(const Managed& managed) { return (managed.asked + kBlock - 1) / kBlock; }
std::size_t size_of_block(const Managed& managed, std::size_t index) {
  return std::min(kBlock, managed.asked - index * kBlock);
}

// To an address where nothing is; nothing is done where something is.
bool move_content(std::byte* from, std::size_t bytes, std::byte* to) {
  void* free = ::mmap(to, bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (free != to) {
    if (free != MAP_FAILED) ::munmap(free, bytes);
    return false;
  }
  if (::mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to) return true;
  ::munmap(to, bytes);
  return false;
}

// What the content of a block takes of the host's memory.
std::size_t room_for_block(const Managed& managed) {
  return takes_large_pages(managed) ? kBlock : (managed.asked + kPage - 1) / kPage * kPage;
}

// False if there is not as much.
bool take_room(std::atomic<std::uint64_t>& room, std::size_t bytes) {
  auto left = room.load();
  while (left >= bytes)
    if (room.compare_exchange_weak(left, left - bytes)) return true;
  return false;
}

// `room`: bytes of the host's that may be taken; less then by what comes from the GPU. What comes
// from the CPU counts until the driver has given it up.
Outcome copy_out(CUdeviceptr address, Managed& managed, std::byte* content, const Pagemap& pages,
                 std::uint64_t& room) {
  for (std::size_t i = 0; i < blocks_of(managed); ++i)
    managed.on_cpu[i] = pages.any(pointer(address) + i * kBlock, size_of_block(managed, i));
  std::atomic<std::uint64_t> left{room};
  std::atomic<std::uint64_t> from_cpu{0};
  const auto copy = [&](std::size_t index, Bounce& bounce) -> Outcome {
    const std::size_t at = index * kBlock;
    const std::size_t bytes = size_of_block(managed, index);
    const std::byte* found = pointer(address) + at;
    if (!managed.on_cpu[index]) {
      if (const auto read = bounce.out(address + at, bytes, found); !read.ok()) return read;
    }
    if (is_zero(found, bytes)) return {};
    const std::size_t needed = room_for_block(managed);
    if (!take_room(left, needed))
      return {CUDA_ERROR_OUT_OF_MEMORY, "room for managed memory on the host"};
    if (managed.on_cpu[index]) from_cpu += needed;
    std::memcpy(content + at, found, bytes);
    return {};
  };
  const auto outcome = Copiers::run(blocks_of(managed), managed.context, copy);
  room = left + from_cpu;
  return outcome;
}

Outcome copy_in(CUdeviceptr address, const Managed& managed, const std::byte* content,
                const Pagemap& pages) {
  const auto copy = [&](std::size_t index, Bounce& bounce) -> Outcome {
    const std::size_t at = index * kBlock;
    const std::size_t bytes = size_of_block(managed, index);
    // What was never touched reads as zeros, there as here.
    if (!pages.any(content + at, bytes)) return {};
    if (!managed.on_cpu[index]) return bounce.in(address + at, content + at, bytes);
    std::memcpy(pointer(address) + at, content + at, bytes);
    return {};
  };
  return Copiers::run(blocks_of(managed), managed.context, copy);
}

CUresult say(const Hint& hint) {
  const auto& call = driver();
  if (hint.kind == Hint::Kind::kAttach)
    return call.cuStreamAttachMemAsync(hint.stream, hint.address, hint.size, hint.what);
  if (hint.kind == Hint::Kind::kPrefetch) {
    if (hint.is_location)
      return call.cuMemPrefetchAsync_v2(hint.address, hint.size, hint.location, hint.what, nullptr);
    return call.cuMemPrefetchAsync(hint.address, hint.size, static_cast<CUdevice>(hint.location),
                                   nullptr);
  }
  const auto advice = static_cast<CUmem_advise>(hint.what);
  if (hint.is_location) return call.cuMemAdvise_v2(hint.address, hint.size, advice, hint.location);
  return call.cuMemAdvise(hint.address, hint.size, advice, static_cast<CUdevice>(hint.location));
}

bool is_to_gpu(const Hint& hint) {
  if (hint.kind != Hint::Kind::kPrefetch) return false;
  // The type of a CUmemLocation is in the lower half.
  if (hint.is_location)
    return static_cast<std::uint32_t>(hint.location) == CU_MEM_LOCATION_TYPE_DEVICE;
  return static_cast<CUdevice>(hint.location) != kDeviceCpu;
}

// Whether all of what the hint is for was on the CPU.
bool is_on_cpu(CUdeviceptr address, const Managed& managed, const Hint& hint) {
  const std::size_t first = (hint.address - address) / kBlock;
  const std::size_t behind = (hint.address - address + hint.size + kBlock - 1) / kBlock;
  for (std::size_t i = first; i < std::min(behind, managed.on_cpu.size()); ++i)
    if (!managed.on_cpu[i]) return false;
  return true;
}

// The driver's memory at `address` again, where nothing is.
Outcome allocate_at(CUdeviceptr address, const Managed& managed) {
  CUdeviceptr got = 0;
  CUresult result;
  {
    const SteeredMapping steered(address, managed.size);
    result = driver().cuMemAllocManaged(&got, managed.size, managed.flags);
  }
  if (result == CUDA_SUCCESS && got == address) return {};
  if (result == CUDA_SUCCESS) driver().cuMemFree_v2(got);
  return {result == CUDA_SUCCESS ? CUDA_ERROR_UNKNOWN : result, "cuMemAllocManaged where it was"};
}

Outcome retake(CUdeviceptr address, Managed& managed) {
  const CurrentContext current(managed.context);
  auto* content = static_cast<std::byte*>(managed.saved);
  if (content == pointer(address)) {
    void* aside = ::mmap(nullptr, managed.size, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (aside == MAP_FAILED) return {CUDA_ERROR_OUT_OF_MEMORY, "mmap"};
    content = static_cast<std::byte*>(aside);
    if (::mremap(pointer(address), managed.size, managed.size, MREMAP_MAYMOVE | MREMAP_FIXED,
                 aside) != aside) {
      ::munmap(aside, managed.size);
      return {CUDA_ERROR_OUT_OF_MEMORY, "mremap"};
    }
    managed.saved = content;
  }
  auto outcome = allocate_at(address, managed);
  if (outcome.ok()) {
    // First where it shall be, then what is there. What a hint meant may have gone.
    for (const Hint& hint : managed.hints)
      if (hint.kind == Hint::Kind::kAdvice || is_to_gpu(hint)) (void)say(hint);
    // What is brought to a GPU arrives before what lies there is written, or brought away again.
    outcome = {driver().cuCtxSynchronize(), "cuCtxSynchronize"};
    if (outcome.ok()) {
      const Pagemap pages;
      outcome = copy_in(address, managed, content, pages);
    }
    if (outcome.ok()) outcome = {driver().cuCtxSynchronize(), "cuCtxSynchronize"};
    if (!outcome.ok()) driver().cuMemFree_v2(address);
  }
  if (!outcome.ok()) {
    if (move_content(content, managed.size, pointer(address))) managed.saved = pointer(address);
    return outcome;
  }
  for (const Hint& hint : managed.hints)
    if (hint.kind == Hint::Kind::kAttach) (void)say(hint);
  ::munmap(content, managed.size);
  managed.saved = nullptr;
  // Now, as it takes memory of the host's; and only of what is there anyhow.
  for (const Hint& hint : managed.hints)
    if (hint.kind == Hint::Kind::kPrefetch && !is_to_gpu(hint) && is_on_cpu(address, managed, hint))
      (void)say(hint);
  return {};
}

Outcome save(CUdeviceptr address, Managed& managed, std::uint64_t& room) {
  const CurrentContext current(managed.context);
  std::byte* content = map_content(managed);
  if (!content) return {CUDA_ERROR_OUT_OF_MEMORY, "mmap"};
  Outcome outcome;
  {
    const Pagemap pages;
    outcome = copy_out(address, managed, content, pages, room);
  }
  if (outcome.ok()) outcome = {driver().cuMemFree_v2(address), "cuMemFree"};
  if (!outcome.ok()) {
    ::munmap(content, managed.size);
    return outcome;
  }
  managed.saved = content;
  if (move_content(content, managed.size, pointer(address))) {
    managed.saved = pointer(address);
    return {};
  }
  // Threads would find nothing there.
  (void)retake(address, managed);
  return {CUDA_ERROR_OUT_OF_MEMORY, "mremap"};
}

}  // namespace

namespace {

// With the tables locked.
std::uint32_t count_areas() {
  std::uint64_t bytes = 0;
  for (const auto& [address, managed] : tables().managed)
    bytes += managed.size;
  return static_cast<std::uint32_t>(bytes / kManagedArea);
}

}  // namespace

std::uint32_t managed_areas() {
  const TablesLock lock;
  return count_areas();
}

void write_managed_areas(std::uint32_t& areas, std::atomic<bool>& any) {
  const TablesLock lock;
  const auto count = count_areas();
  any = count > 0;
  __atomic_store_n(&areas, count, __ATOMIC_RELAXED);
}

std::uint32_t managed_away() {
  const TablesLock lock;
  std::uint32_t count = 0;
  for (const auto& [address, managed] : tables().managed)
    count += !managed.present();
  return count;
}

namespace {

// Of the pieces that are there, or of those that are away, until one fails.
template <class Act>
Outcome each_piece(bool present, Act act) {
  Outcome outcome;
  CUcontext last = nullptr;
  for (auto& [address, managed] : tables().managed) {
    if (managed.present() != present) continue;
    last = managed.context;
    outcome = act(address, managed);
    if (!outcome.ok()) break;
  }
  const CurrentContext current(last);
  Copiers::let_go();
  return outcome;
}

}  // namespace

Outcome save_managed(std::uint64_t room) {
  return each_piece(
      true, [&](CUdeviceptr address, Managed& managed) { return save(address, managed, room); });
}

Outcome retake_managed() {
  return each_piece(false,
                    [](CUdeviceptr address, Managed& managed) { return retake(address, managed); });
}

}  // namespace stasis::preload
