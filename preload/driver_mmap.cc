#include "driver_mmap.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "driver_imports.h"
#include "intercept.h"
#include "pages.h"

namespace stasis::preload {
namespace {

// At a checkpoint the driver's thread is the only one that runs: the others may have stopped with
// any lock of the C library in their hands. So what is called from mmap() takes none, and whatever
// has to be found out is found out before.

constexpr std::size_t kNoAddress = std::size_t{1} << 46;  // there are no more addresses
constexpr int kDriversFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;

using Mmap = void*(void*, std::size_t, int, int, int, off_t);
using Munmap = int(void*, std::size_t);

// The C library's, or those of another library that stands in for it.
std::atomic<Mmap*> g_next{nullptr};
std::atomic<Munmap*> g_next_munmap{nullptr};
// Where the driver's code is.
std::atomic<std::uintptr_t> g_begin{0};
std::atomic<std::uintptr_t> g_end{0};
std::atomic<bool> g_huge_pages{false};

// Initial-exec: as in gate.h.
constinit thread_local SteeredMapping* g_steered __attribute__((tls_model("initial-exec"))) =
    nullptr;
constinit thread_local KeptAddresses* g_kept __attribute__((tls_model("initial-exec"))) = nullptr;

__attribute__((constructor)) void find_next() {
  g_next.store(reinterpret_cast<Mmap*>(real_dlsym()(RTLD_NEXT, "mmap")));
  g_next_munmap.store(reinterpret_cast<Munmap*>(real_dlsym()(RTLD_NEXT, "munmap")));
}

void* next(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (auto* function = g_next.load(std::memory_order_relaxed))
    return function(address, bytes, protection, flags, fd, offset);
  // A constructor of another library, before ours.
  return reinterpret_cast<void*>(
      ::syscall(SYS_mmap, address, bytes, protection, flags, fd, offset));
}

bool in_driver(const void* code) {
  const auto at = reinterpret_cast<std::uintptr_t>(code);
  return g_begin.load(std::memory_order_relaxed) <= at &&
         at < g_end.load(std::memory_order_relaxed);
}

bool huge_pages_are_off() {
  char text[64] = {};
  const int fd = ::open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;
  const ssize_t got = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  return got <= 0 || std::strstr(text, "[never]") != nullptr;
}

// Nothing if it cannot be had so.
void* in_huge_pages(std::size_t bytes) {
  const std::size_t pages = (bytes + 4095) / 4096 * 4096;
  void* raw =
      next(nullptr, pages + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto from = reinterpret_cast<std::uintptr_t>(raw);
  const auto begin = (from + kHugePage - 1) / kHugePage * kHugePage;
  if (begin > from) ::munmap(raw, begin - from);
  ::munmap(reinterpret_cast<void*>(begin + pages), from + kHugePage - begin);
  auto* at = reinterpret_cast<void*>(begin);
  ::madvise(at, pages, MADV_HUGEPAGE);
  return at;
}

void* map(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset,
          const void* caller) {
  if (g_steered && g_steered->is_meant(address, bytes, protection, fd) && in_driver(caller))
      [[unlikely]]
    return g_steered->map(bytes, flags);
  if (g_kept && address && protection == PROT_NONE && g_kept->touches(address, bytes) &&
      in_driver(caller)) [[unlikely]] {
    if (g_kept->holds(address, bytes)) {
      // In the place of what keeps them: there is no moment at which they are free.
      void* at =
          next(address, bytes, protection, (flags & ~MAP_FIXED_NOREPLACE) | MAP_FIXED, fd, offset);
      if (at == address) g_kept->give(address, bytes);
      return at;
    }
    g_kept->let_go();
  }
  const bool meant = flags == kDriversFlags && address == nullptr && bytes >= 2 * kHugePage &&
                     bytes < kNoAddress && protection == (PROT_READ | PROT_WRITE) &&
                     g_huge_pages.load(std::memory_order_relaxed) && in_driver(caller);
  if (meant) [[unlikely]] {
    const int error = errno;
    void* at = in_huge_pages(bytes);
    errno = error;
    if (at) return at;
  }
  return next(address, bytes, protection, flags, fd, offset);
}

int unmap_for(void* address, std::size_t bytes, const void* caller) {
  if (g_steered && g_steered->is_beyond(address) && in_driver(caller)) [[unlikely]]
    return 0;
  if (g_kept && g_kept->touches(address, bytes) && in_driver(caller)) [[unlikely]] {
    g_kept->keep(address, bytes);
    return 0;
  }
  if (auto* function = g_next_munmap.load(std::memory_order_relaxed))
    return function(address, bytes);
  return static_cast<int>(::syscall(SYS_munmap, address, bytes));
}

}  // namespace

SteeredMapping::SteeredMapping(std::uintptr_t address, std::size_t bytes)
    : address_(address), bytes_(bytes) {
  g_steered = this;
}
SteeredMapping::~SteeredMapping() { g_steered = nullptr; }

bool SteeredMapping::is_meant(const void* address, std::size_t bytes, int protection,
                              int fd) const {
  return asked_ == 0 && address == nullptr && fd < 0 && protection == PROT_NONE && bytes >= bytes_;
}

void* SteeredMapping::map(std::size_t bytes, int flags) {
  asked_ = bytes;
  auto* wanted = reinterpret_cast<void*>(address_);
  void* at = next(wanted, bytes_, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
  used_ = at == wanted;
  // A kernel before 4.17 takes the address for a hint, and the driver would believe that it has
  // more than this.
  if (!used_ && at != MAP_FAILED) {
    ::syscall(SYS_munmap, at, bytes_);
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return at;
}

bool SteeredMapping::is_beyond(const void* address) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return used_ && at >= address_ + bytes_ && at < address_ + asked_;
}

KeptAddresses::KeptAddresses(std::uintptr_t address, std::size_t bytes)
    : address_(address), bytes_(bytes) {
  g_kept = this;
}
KeptAddresses::~KeptAddresses() {
  let_go();
  g_kept = nullptr;
}

bool KeptAddresses::touches(const void* address, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return at < address_ + bytes_ && address_ < at + bytes;
}

bool KeptAddresses::holds(const void* address, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return all() && given_bytes_ == 0 && at >= address_ && at + bytes <= address_ + bytes_;
}

void KeptAddresses::keep(void* address, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const auto from = std::max(at, address_);
  const auto to = std::min(at + bytes, address_ + bytes_);
  void* kept = next(reinterpret_cast<void*>(from), to - from, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (kept == MAP_FAILED) {
    ::syscall(SYS_munmap, address, bytes);
    return;
  }
  kept_ += to - from;
  if (at < from) ::syscall(SYS_munmap, at, from - at);
  if (at + bytes > to) ::syscall(SYS_munmap, to, at + bytes - to);
}

void KeptAddresses::give(const void* address, std::size_t bytes) {
  given_ = reinterpret_cast<std::uintptr_t>(address);
  given_bytes_ = bytes;
}

// Only of what is kept as a whole: of parts it is not known which they are, and they stay.
void KeptAddresses::let_go() {
  if (!all() || bytes_ == 0) return;
  if (given_bytes_ == 0) given_ = address_;
  if (given_ > address_) ::syscall(SYS_munmap, address_, given_ - address_);
  const auto behind = given_ + given_bytes_;
  if (behind < address_ + bytes_) ::syscall(SYS_munmap, behind, address_ + bytes_ - behind);
  bytes_ = kept_ = 0;
}

bool stand_in_for_driver_library(const void* function) {
  note_driver_library(function);
  const Import imports[] = {{"mmap", reinterpret_cast<std::uintptr_t>(&::mmap64)},
                            {"mmap64", reinterpret_cast<std::uintptr_t>(&::mmap64)},
                            {"munmap", reinterpret_cast<std::uintptr_t>(&::munmap)}};
  return replace_imports(function, imports);
}

void note_driver_library(const void* function) {
  g_huge_pages.store(!huge_pages_are_off());
  struct Search {
    std::uintptr_t function;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
  } search{reinterpret_cast<std::uintptr_t>(function)};
  ::dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const auto& part = library->dlpi_phdr[i];
          if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
          const std::uintptr_t begin = library->dlpi_addr + part.p_vaddr;
          const std::uintptr_t end = begin + part.p_memsz;
          if (wanted.function < begin || wanted.function >= end) continue;
          wanted.begin = begin;
          wanted.end = end;
          return 1;
        }
        return 0;
      },
      &search);
  // In this order: until the end is known, no code is within.
  g_begin.store(search.begin);
  g_end.store(search.end);
}

}  // namespace stasis::preload

// Two names for one function, as in the C library. The compiler calls this one by both.
// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
extern "C" void* mmap64(void* address, std::size_t bytes, int protection, int flags, int fd,
                        off64_t offset) noexcept {
  return stasis::preload::map(address, bytes, protection, flags, fd, offset,
                              __builtin_return_address(0));
}
extern "C" int munmap(void* address, std::size_t bytes) noexcept {
  return stasis::preload::unmap_for(address, bytes, __builtin_return_address(0));
}
asm(".globl mmap\n.type mmap, @function\n.set mmap, mmap64\n");
