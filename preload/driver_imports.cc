#include "driver_imports.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "elf_dynamic.h"

namespace stasis::preload {
namespace {

struct Library {
  std::uintptr_t code = 0;
  std::uintptr_t base = 0;
  const ElfW(Dyn) * dynamic = nullptr;
  std::uintptr_t relro_begin = 0;  // whole pages, that the loader has made read-only
  std::uintptr_t relro_end = 0;
};

int find(dl_phdr_info* info, std::size_t, void* data) {
  auto& wanted = *static_cast<Library*>(data);
  Library found{wanted.code, info->dlpi_addr};
  const auto page = static_cast<std::uintptr_t>(::getpagesize());
  bool is_it = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const std::uintptr_t begin = info->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD) is_it = is_it || wanted.code - begin < part.p_memsz;
    if (part.p_type == PT_DYNAMIC) found.dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    if (part.p_type == PT_GNU_RELRO) {
      found.relro_begin = begin / page * page;
      found.relro_end = (begin + part.p_memsz) / page * page;
    }
  }
  if (!is_it || !found.dynamic) return 0;
  wanted = found;
  return 1;
}

struct Slot {
  std::uintptr_t* place;
  std::uintptr_t function;
};

std::vector<Slot> find_slots(const Library& library, std::span<const Import> imports) {
  std::vector<Slot> slots;
  const ElfDynamic dynamic(library.base, library.dynamic);
  dynamic.for_each_slot(library.base, [&](std::uintptr_t* place, const char* name) {
    for (const Import& import : imports)
      if (std::strcmp(name, import.name) == 0) slots.push_back({place, import.function});
  });
  return slots;
}

}  // namespace

bool replace_imports(const void* code, std::span<const Import> imports) {
  Library library;
  library.code = reinterpret_cast<std::uintptr_t>(code);
  if (::dl_iterate_phdr(&find, &library) != 1) return false;
  const auto slots = find_slots(library, imports);
  if (slots.empty()) return false;
  const auto is_read_only = [&](const Slot& slot) {
    const auto place = reinterpret_cast<std::uintptr_t>(slot.place);
    return place >= library.relro_begin && place < library.relro_end;
  };
  bool any_read_only = false;
  for (const Slot& slot : slots)
    any_read_only = any_read_only || is_read_only(slot);
  auto* relro = reinterpret_cast<void*>(library.relro_begin);
  const auto bytes = library.relro_end - library.relro_begin;
  if (any_read_only && ::mprotect(relro, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  for (const Slot& slot : slots)
    __atomic_store_n(slot.place, slot.function, __ATOMIC_RELEASE);
  if (any_read_only) ::mprotect(relro, bytes, PROT_READ);
  return true;
}

}  // namespace stasis::preload
