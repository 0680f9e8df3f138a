// What a library that is loaded says of itself, as far as it concerns the functions that it has
// from others.
#pragma once

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace stasis::preload {

struct ElfDynamic {
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  // Of what it imports nothing else is common to all: the hash tables need not tell how many
  // symbols there are.
  std::span<const ElfW(Rela)> relocations[2];
  const ElfW(Dyn) * entries;

  // Allocates nothing: the program's malloc() may wait for the loader's lock.
  ElfDynamic(ElfW(Addr) base, const ElfW(Dyn) * section) : entries(section) {
    // Where it can write to the section, the loader has turned them into addresses.
    const auto at = [&](ElfW(Addr) address) {
      return reinterpret_cast<const void*>(address < base ? address + base : address);
    };
    const ElfW(Rela) * tables[2] = {};
    std::size_t bytes[2] = {};
    std::size_t relative = 0;  // the first of the one table, millions in large libraries
    for (const auto* entry = section; entry && entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols = static_cast<const ElfW(Sym)*>(at(entry->d_un.d_ptr));
          break;
        case DT_STRTAB:
          strings = static_cast<const char*>(at(entry->d_un.d_ptr));
          break;
        case DT_RELA:
          tables[0] = static_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr));
          break;
        case DT_RELASZ:
          bytes[0] = entry->d_un.d_val;
          break;
        case DT_RELACOUNT:
          relative = entry->d_un.d_val;
          break;
        case DT_JMPREL:
          tables[1] = static_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr));
          break;
        case DT_PLTRELSZ:
          bytes[1] = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
    for (int i = 0; i < 2; ++i)
      if (symbols && strings && tables[i])
        relocations[i] = {tables[i], bytes[i] / sizeof(ElfW(Rela))};
    relocations[0] = relocations[0].subspan(std::min(relative, relocations[0].size()));
  }

  // The names of the libraries that it was linked with.
  template <class Visit>
  void for_each_needed(Visit visit) const {
    for (const auto* entry = entries; strings && entry && entry->d_tag != DT_NULL; ++entry)
      if (entry->d_tag == DT_NEEDED) visit(strings + entry->d_un.d_val);
  }

  template <class Test>
  bool imports(Test test) const {
    for (const auto& table : relocations) {
      for (const auto& relocation : table) {
        const auto index = ELF64_R_SYM(relocation.r_info);
        const auto& symbol = symbols[index];
        if (index != 0 && symbol.st_shndx == SHN_UNDEF && test(strings + symbol.st_name))
          return true;
      }
    }
    return false;
  }

  // Of each of those that the loader binds: where it has entered the address, and the name.
  template <class Visit>
  void for_each_slot(ElfW(Addr) base, Visit visit) const {
    for (const auto& table : relocations) {
      for (const auto& relocation : table) {
        const auto type = ELF64_R_TYPE(relocation.r_info);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
        visit(reinterpret_cast<std::uintptr_t*>(base + relocation.r_offset),
              strings + symbols[ELF64_R_SYM(relocation.r_info)].st_name);
      }
    }
  }
};

}  // namespace stasis::preload
