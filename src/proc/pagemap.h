// Entries of /proc/PID/pagemap, one for each page of 4 KiB (the kernel's
// Documentation/admin-guide/mm/pagemap.rst). All but the frame is shown to each process that may
// open the file.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace stasis::proc {

class PageEntry {
 public:
  bool is_present() const { return has(63); }
  bool is_swapped() const { return has(62); }
  // Something was written or read there.
  bool is_touched() const { return is_present() || is_swapped(); }
  // A page of a file, or of memory that is shared.
  bool is_of_file() const { return has(61); }
  // Kept from writes by a userfaultfd.
  bool is_write_protected() const { return has(57); }
  // In memory, and no other process's: not the page of zeros, which belongs to all.
  bool is_owned() const { return is_present() && has(56); }
  // 0: of a page that is not in memory, or the caller may not know (CAP_SYS_ADMIN).
  std::uint64_t frame() const { return is_present() ? bits_ & ((std::uint64_t{1} << 55) - 1) : 0; }

 private:
  bool has(int bit) const { return (bits_ >> bit & 1) != 0; }

  std::uint64_t bits_ = 0;
};
static_assert(sizeof(PageEntry) == sizeof(std::uint64_t));

// Those of the page of `address` and the ones after it: how many were read, which is fewer at the
// end of the addresses, and none where the process has ended or the file cannot be read.
inline std::size_t read_pagemap(int pagemap, std::uint64_t address, std::span<PageEntry> entries) {
  constexpr std::uint64_t kBytes = 4096;
  const auto from = static_cast<off_t>(address / kBytes * sizeof(PageEntry));
  const ssize_t got = ::pread(pagemap, entries.data(), entries.size_bytes(), from);
  return got <= 0 ? 0 : static_cast<std::size_t>(got) / sizeof(PageEntry);
}

}  // namespace stasis::proc
