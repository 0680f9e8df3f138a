#include "driver_imports.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

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

struct Table {
  const ElfW(Rela) * entries = nullptr;
  std::size_t count = 0;
};

struct Slot {
  std::uintptr_t* place;
  std::uintptr_t function;
};

std::vector<Slot> find_slots(const Library& library, std::span<const Import> imports) {
  Table tables[2];  // of functions that are bound when they are called, and of all else
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  // The C library enters addresses here, others leave them as they are in the file.
  const auto at = [&](ElfW(Addr) value) {
    return value < library.base ? library.base + value : value;
  };
  for (const auto* one = library.dynamic; one->d_tag != DT_NULL; ++one) {
    switch (one->d_tag) {
      case DT_JMPREL:
        tables[0].entries = reinterpret_cast<const ElfW(Rela)*>(at(one->d_un.d_ptr));
        break;
      case DT_PLTRELSZ:
        tables[0].count = one->d_un.d_val / sizeof(ElfW(Rela));
        break;
      case DT_RELA:
        tables[1].entries = reinterpret_cast<const ElfW(Rela)*>(at(one->d_un.d_ptr));
        break;
      case DT_RELASZ:
        tables[1].count = one->d_un.d_val / sizeof(ElfW(Rela));
        break;
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(at(one->d_un.d_ptr));
        break;
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(at(one->d_un.d_ptr));
        break;
      default:
        break;
    }
  }
  std::vector<Slot> slots;
  if (!symbols || !names) return slots;
  for (const Table& table : tables) {
    for (std::size_t i = 0; table.entries && i < table.count; ++i) {
      const auto& entry = table.entries[i];
      const auto type = ELF64_R_TYPE(entry.r_info);
      if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
      const char* name = names + symbols[ELF64_R_SYM(entry.r_info)].st_name;
      for (const Import& import : imports)
        if (std::strcmp(name, import.name) == 0)
          slots.push_back(
              {reinterpret_cast<std::uintptr_t*>(library.base + entry.r_offset), import.function});
    }
  }
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
