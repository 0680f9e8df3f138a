#include "attach/elf_image.h"

#include <elf.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace stasis::attach {
namespace {

constexpr std::size_t kMostHeaders = 64;
constexpr std::size_t kMostDynamic = 1024;
constexpr std::uint64_t kLargestLibrary = std::uint64_t{4} << 30;
constexpr std::uint64_t kLargestThreadImage = std::uint64_t{1} << 20;
constexpr std::uint32_t kMostBuckets = 1U << 20;
constexpr std::uint32_t kMostSymbols = 1U << 20;
constexpr int kLongestChain = 4096;
constexpr std::uint16_t kHiddenVersion = 0x8000;

std::uint32_t gnu_hash(std::string_view name) {
  std::uint32_t hash = 5381;
  for (const char c : name)
    hash = hash * 33 + static_cast<unsigned char>(c);
  return hash;
}

std::uint32_t sysv_hash(std::string_view name) {
  std::uint32_t hash = 0;
  for (const char c : name) {
    hash = (hash << 4) + static_cast<unsigned char>(c);
    const std::uint32_t high = hash & 0xf0000000U;
    hash = (hash ^ (high >> 24)) & ~high;
  }
  return hash;
}

bool is_ours(const Elf64_Ehdr& header) {
  return std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
         header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_ident[EI_DATA] == ELFDATA2LSB &&
         header.e_machine == EM_X86_64 && header.e_phentsize == sizeof(Elf64_Phdr) &&
         header.e_phnum > 0 && header.e_phnum <= kMostHeaders && header.e_phoff <= kLargestLibrary;
}

}  // namespace

Result<ElfImage> ElfImage::read(MemoryReader memory, std::uint64_t base) {
  ElfImage image(std::move(memory), base);
  if (base < kLastAddress && image.read_headers()) return image;
  return fail(ErrorCode::kNotSupported,
              fmt::format("what lies at {:#x} is no 64-bit library with dynamic symbols", base));
}

bool ElfImage::read_headers() {
  Elf64_Ehdr header;
  if (!memory_(base_, &header, sizeof header) || !is_ours(header)) return false;
  std::vector<Elf64_Phdr> parts(header.e_phnum);
  if (!memory_(base_ + header.e_phoff, parts.data(), parts.size() * sizeof parts[0])) return false;
  // Of the file's addresses, those of its first and its last page.
  std::uint64_t first = kLastAddress;
  std::uint64_t last = 0;
  for (const Elf64_Phdr& part : parts) {
    if (part.p_vaddr >= kLastAddress || part.p_memsz > kLargestLibrary) return false;
    if (part.p_type != PT_LOAD) continue;
    first = std::min(first, part.p_vaddr / kPage * kPage);
    last = std::max(last, part.p_vaddr + part.p_memsz);
  }
  if (first >= last || last - first > kLargestLibrary) return false;
  bias_ = base_ - first;  // may wrap
  end_ = base_ + (last - first);
  if (end_ >= kLastAddress) return false;
  std::uint64_t dynamic_size = 0;
  for (const Elf64_Phdr& part : parts) {
    if (part.p_type != PT_DYNAMIC && part.p_type != PT_TLS) continue;
    const bool inside = part.p_vaddr >= first && part.p_vaddr + part.p_filesz <= last;
    if (!inside || part.p_filesz > part.p_memsz) return false;
    if (part.p_type == PT_DYNAMIC) {
      dynamic_ = bias_ + part.p_vaddr;
      dynamic_size = part.p_memsz;
    } else {
      if (part.p_memsz > kLargestThreadImage) return false;
      thread_image_ = ThreadImage{bias_ + part.p_vaddr, part.p_filesz, part.p_memsz};
    }
  }
  return dynamic_ != 0 && read_dynamic(dynamic_, dynamic_size);
}

std::uint64_t ElfImage::placed(std::uint64_t value) const {
  return value >= base_ && value < end_ ? value : bias_ + value;
}

bool ElfImage::read_dynamic(std::uint64_t at, std::uint64_t size) {
  const auto count = std::min<std::size_t>(size / sizeof(Elf64_Dyn), kMostDynamic);
  std::vector<Elf64_Dyn> entries(count);
  if (count == 0 || !memory_(at, entries.data(), count * sizeof entries[0])) return false;
  for (const Elf64_Dyn& entry : entries) {
    const std::uint64_t value = entry.d_un.d_val;
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_STRSZ) tables_.strings_size = value;
    if (value > kLastAddress) continue;
    if (entry.d_tag == DT_SYMTAB) tables_.symbols = placed(value);
    if (entry.d_tag == DT_STRTAB) tables_.strings = placed(value);
    if (entry.d_tag == DT_VERSYM) tables_.versions = placed(value);
    if (entry.d_tag == DT_GNU_HASH) tables_.gnu_hash = placed(value);
    if (entry.d_tag == DT_HASH) tables_.sysv_hash = placed(value);
  }
  return tables_.symbols != 0 && tables_.strings != 0 && tables_.strings_size <= kLargestLibrary &&
         (tables_.gnu_hash != 0 || tables_.sysv_hash != 0);
}

bool ElfImage::is_named(std::uint32_t index, std::string_view name) const {
  Elf64_Sym symbol;
  if (index >= kMostSymbols) return false;
  if (!memory_(tables_.symbols + index * sizeof symbol, &symbol, sizeof symbol)) return false;
  if (symbol.st_name + name.size() + 1 > tables_.strings_size) return false;
  std::string found(name.size() + 1, '\1');
  return memory_(tables_.strings + symbol.st_name, found.data(), found.size()) &&
         found.back() == '\0' && std::string_view(found).substr(0, name.size()) == name;
}

// Each symbol of that name, by its index.
template <class Visit>
void ElfImage::for_each_named(std::string_view name, const Visit& visit) const {
  if (tables_.gnu_hash != 0) {
    std::array<std::uint32_t, 4>
        head{};  // buckets, the first symbol, words of the filter, its shift
    if (!memory_(tables_.gnu_hash, head.data(), sizeof head)) return;
    const auto [buckets, first, filter, shift] = head;
    if (buckets == 0 || buckets > kMostBuckets || filter > kMostBuckets) return;
    const std::uint64_t table = tables_.gnu_hash + sizeof head + std::uint64_t{filter} * 8;
    const std::uint32_t hash = gnu_hash(name);
    std::uint32_t index = 0;
    if (!memory_(table + std::uint64_t{hash % buckets} * 4, &index, sizeof index)) return;
    if (index < first) return;
    for (int steps = 0; steps < kLongestChain && index < kMostSymbols; ++steps, ++index) {
      std::uint32_t word = 0;
      const std::uint64_t at =
          table + std::uint64_t{buckets} * 4 + std::uint64_t{index - first} * 4;
      if (!memory_(at, &word, sizeof word)) return;
      if ((word | 1) == (hash | 1) && is_named(index, name)) visit(index);
      if ((word & 1) != 0) return;
    }
    return;
  }
  std::array<std::uint32_t, 2> head{};  // buckets, chains
  if (!memory_(tables_.sysv_hash, head.data(), sizeof head)) return;
  const auto [buckets, chains] = head;
  if (buckets == 0 || buckets > kMostBuckets || chains > kMostSymbols) return;
  const std::uint64_t table = tables_.sysv_hash + sizeof head;
  std::uint32_t index = 0;
  if (!memory_(table + std::uint64_t{sysv_hash(name) % buckets} * 4, &index, sizeof index)) return;
  for (int steps = 0; steps < kLongestChain && index != 0 && index < chains; ++steps) {
    if (is_named(index, name)) visit(index);
    const std::uint64_t at = table + std::uint64_t{buckets} * 4 + std::uint64_t{index} * 4;
    if (!memory_(at, &index, sizeof index)) return;
  }
}

std::optional<ElfImage::Symbol> ElfImage::find(std::string_view name) const {
  std::optional<Symbol> found;
  bool is_default = false;
  for_each_named(name, [&](std::uint32_t index) {
    Elf64_Sym symbol;
    if (!memory_(tables_.symbols + index * sizeof symbol, &symbol, sizeof symbol)) return;
    const std::uint64_t address = bias_ + symbol.st_value;
    if (symbol.st_shndx == SHN_UNDEF || address < base_ || address >= end_) return;
    std::uint16_t version = 0;
    if (tables_.versions != 0 &&
        !memory_(tables_.versions + std::uint64_t{index} * 2, &version, sizeof version))
      return;
    if (found && (is_default || (version & kHiddenVersion) != 0)) return;
    is_default = (version & kHiddenVersion) == 0;
    found = Symbol{address, symbol.st_size, static_cast<unsigned>(ELF64_ST_TYPE(symbol.st_info))};
  });
  return found;
}

std::optional<std::uint64_t> ElfImage::function(std::string_view name) const {
  const auto symbol = find(name);
  if (!symbol || symbol->type != STT_FUNC) return std::nullopt;
  return symbol->address;
}

std::optional<std::uint64_t> ElfImage::object(std::string_view name, std::uint64_t size) const {
  const auto symbol = find(name);
  if (!symbol || symbol->type != STT_OBJECT || symbol->size < size || size > end_ - symbol->address)
    return std::nullopt;
  return symbol->address;
}

}  // namespace stasis::attach
