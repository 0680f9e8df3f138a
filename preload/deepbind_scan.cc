#include "deepbind_scan.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "elf_dynamic.h"
#include "gate.h"
#include "intercept.h"

namespace stasis::preload {
namespace {

using Dlopen = void*(const char*, int);
using Addresses = std::vector<ElfW(Addr)>;

struct DeepLoad {
  char* name;
  // The libraries that were loaded already, and stay bound as they are. A list that was replaced is
  // never freed.
  std::atomic<const Addresses*> before;
  DeepLoad* next;
};
// Added to at its head, and never taken from. No lock: a fork would have to wait for it.
std::atomic<DeepLoad*> g_deep{nullptr};
std::atomic<std::uint64_t> g_deep_loads{0};

int add_address(dl_phdr_info* info, std::size_t, void* list) {
  static_cast<Addresses*>(list)->push_back(info->dlpi_addr);
  return 0;
}

bool is_loaded(const char* name) {
  void* handle = ::dlopen(name, RTLD_NOLOAD | RTLD_LAZY);
  if (handle) ::dlclose(handle);
  return handle != nullptr;
}

void remember(const char* name) {
  auto* known = g_deep.load(std::memory_order_acquire);
  while (known && std::strcmp(known->name, name) != 0)
    known = known->next;
  if (known && is_loaded(name)) return;
  auto* before = new Addresses;
  ::dl_iterate_phdr(&add_address, before);
  if (known) {
    // Opened again, after it was closed.
    if (*known->before.load(std::memory_order_acquire) == *before) return delete before;
    known->before.store(before, std::memory_order_release);
    return;
  }
  auto* load = new DeepLoad{::strdup(name), before, g_deep.load(std::memory_order_relaxed)};
  if (!load->name) ::abort();  // as of new
  while (!g_deep.compare_exchange_weak(load->next, load, std::memory_order_release)) {
  }
}

// Most libraries look for other things by dlsym. One that is too large to be read through may look
// for the driver.
bool names_driver(const dl_phdr_info& info) {
  constexpr std::size_t kReadAtMost = 64UL << 20;
  std::size_t read = 0;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const auto& part = info.dlpi_phdr[i];
    if (part.p_type != PT_LOAD || !(part.p_flags & PF_R)) continue;
    read += part.p_filesz;
    if (read > kReadAtMost) return true;
    const auto* begin = reinterpret_cast<const char*>(info.dlpi_addr + part.p_vaddr);
    for (const char* name : {"libcuda.so", "cuGetProcAddress", "cuMem"})
      if (::memmem(begin, part.p_filesz, name, std::strlen(name))) return true;
  }
  return false;
}

struct Search {
  ElfW(Addr) address;
  bool found;
};

int search_names(dl_phdr_info* info, std::size_t, void* search) {
  auto& wanted = *static_cast<Search*>(search);
  if (info->dlpi_addr != wanted.address) return 0;
  wanted.found = names_driver(*info);
  return 1;
}

// A child that is forked while the loader's lock is held never gets it.
pthread_mutex_t g_looking = PTHREAD_MUTEX_INITIALIZER;

void probe_all(int (*look)(dl_phdr_info*, std::size_t, void*), void* argument) {
  ::pthread_mutex_lock(&g_looking);
  ::dl_iterate_phdr(look, argument);
  ::pthread_mutex_unlock(&g_looking);
}

bool may_call_driver(const link_map& map, const ElfDynamic& dynamic) {
  if (dynamic.imports([](const char* name) {
        return name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
      })) {
    return true;
  }
  if (!dynamic.imports([](const char* name) {
        return !std::strcmp(name, "dlsym") || !std::strcmp(name, "dlvsym");
      })) {
    return false;
  }
  Search search{map.l_addr, false};
  probe_all(&search_names, &search);
  return search.found;
}

// The driver itself, which programs may open so, too.
bool is_drivers_own(const char* path) {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash ? slash + 1 : path;
  return !std::strncmp(name, "libcuda.so", 10) || !std::strncmp(name, "libnvidia-", 10);
}

// It and what it needs, as far as that was loaded with it.
bool is_deep_bound(const DeepLoad& load) {
  const Addresses& before = *load.before.load(std::memory_order_acquire);
  std::vector<void*> handles;
  std::vector<const link_map*> seen;
  const auto visit = [&](const char* name) {
    void* handle = ::dlopen(name, RTLD_NOLOAD | RTLD_LAZY);
    if (!handle) {
      ::dlerror();  // it is not loaded any more
      return;
    }
    handles.push_back(handle);
    const auto* map = static_cast<const link_map*>(handle);
    const bool was_there = std::find(before.begin(), before.end(), map->l_addr) != before.end();
    if (!was_there && !is_drivers_own(map->l_name) &&
        std::find(seen.begin(), seen.end(), map) == seen.end())
      seen.push_back(map);
  };
  visit(load.name);
  bool found = false;
  for (std::size_t i = 0; i < seen.size() && !found; ++i) {
    const ElfDynamic dynamic(seen[i]->l_addr, seen[i]->l_ld);
    found = may_call_driver(*seen[i], dynamic);
    if (!found) dynamic.for_each_needed(visit);
  }
  for (void* handle : handles)
    ::dlclose(handle);
  return found;
}

constexpr std::size_t kLongestName = 200;

// Finds a library that has bound the driver, or the C library's dlsym, however it was opened: the
// dlopen of a library that was opened so is not the agent's either.
int search_bound(dl_phdr_info* info, std::size_t, void* name) {
  const ElfW(Dyn)* section = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
      section = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
  if (!section || is_drivers_own(info->dlpi_name)) return 0;
  bool has_dlsym = false;
  bool has_driver = false;
  const ElfDynamic dynamic(info->dlpi_addr, section);
  dynamic.for_each_slot(info->dlpi_addr, [&](const std::uintptr_t* place, const char*) {
    auto* bound = reinterpret_cast<void*>(*place);
    has_dlsym = has_dlsym || bound == reinterpret_cast<void*>(real_dlsym());
    has_driver = has_driver || in_place_of(bound) != bound;
  });
  if (!has_driver && !(has_dlsym && names_driver(*info))) return 0;
  std::snprintf(static_cast<char*>(name), kLongestName, "%s", info->dlpi_name);
  return 1;
}

}  // namespace

std::string library_deep_bound() {
  for (const auto* load = g_deep.load(std::memory_order_acquire); load; load = load->next)
    if (is_deep_bound(*load)) return load->name;
  // Only such a library opens others without the agent's knowledge.
  if (!g_deep.load(std::memory_order_acquire)) return {};
  char name[kLongestName] = "";
  probe_all(&search_bound, name);
  return name;
}

void lock_looking_for_fork() { ::pthread_mutex_lock(&g_looking); }
void unlock_looking_after_fork() { ::pthread_mutex_unlock(&g_looking); }

std::uint64_t deep_loads() { return g_deep_loads.load(std::memory_order_acquire); }

// Called by the stub below.
extern "C" __attribute__((visibility("hidden"), used)) Dlopen* stasis_dlopen_next(const char* name,
                                                                                  int mode) {
  static std::atomic<Dlopen*> found{nullptr};
  const int error = errno;
  auto* function = found.load(std::memory_order_relaxed);
  if (!function) {
    function = reinterpret_cast<Dlopen*>(::dlvsym(RTLD_NEXT, "dlopen", "GLIBC_2.2.5"));
    found.store(function, std::memory_order_relaxed);
  }
  if (name && (mode & RTLD_DEEPBIND)) {
    // The library may call the driver as soon as it is loaded, and nothing holds it back.
    const Gate::Pass pass;
    remember(name);
    g_deep_loads.fetch_add(1, std::memory_order_release);
  }
  errno = error;
  return function;
}

}  // namespace stasis::preload

// The C library searches the paths of the library that calls, which the return address tells: so it
// is handed on by a jump, with the stack as it came.
asm(R"(
  .text
  .globl dlopen
  .type dlopen, @function
dlopen:
  .cfi_startproc
  endbr64
  push %rdi
  .cfi_adjust_cfa_offset 8
  push %rsi
  .cfi_adjust_cfa_offset 8
  sub $8, %rsp
  .cfi_adjust_cfa_offset 8
  call stasis_dlopen_next
  add $8, %rsp
  .cfi_adjust_cfa_offset -8
  pop %rsi
  .cfi_adjust_cfa_offset -8
  pop %rdi
  .cfi_adjust_cfa_offset -8
  jmp *%rax
  .cfi_endproc
  .size dlopen, . - dlopen
)");
