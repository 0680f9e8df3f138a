// Private memory of another process as a place for content, by process_vm_readv and _writev.
//
// Needs the permission to trace the process. Does not own the process or its pidfd, which must
// outlive this. Threads: any number at once.
#pragma once

#include "base/fd.h"
#include "base/interrupt.h"
#include "direct/content.h"
#include "stasis/ids.h"

namespace stasis::direct {

class RemoteMemory final : public Content {
 public:
  // `bytes` of memory at `address` of `pid`, which `pidfd` holds: the calls take a number, and one
  // that was used again in between is noticed, because the pidfd says that its process has ended.
  RemoteMemory(Pid pid, const Pidfd& pidfd, std::uint64_t address, std::uint64_t bytes)
      : pid_(pid), pidfd_(&pidfd), address_(address), bytes_(bytes) {}

  // kProcessGone if the process has ended, kUsage beyond the range, kIo where the process has no
  // memory (or none that may be written), kNotPermitted.
  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override;
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override;

  // Makes the process own every page, so that write() meets no page fault: a first touch is ten
  // times slower than the copy itself. For memory whose content does not matter: a byte of each
  // page that was missing becomes 0. Huge pages are taken where the process's mapping asks for them
  // (MADV_HUGEPAGE) and the kernel has some, and all others one by one. `threads` 0:
  // default_threads().
  Result<void> fault_in(unsigned threads, const Interrupt& interrupt);

  std::uint64_t size() const { return bytes_; }

 private:
  Result<void> check_range(std::uint64_t offset, std::uint64_t bytes) const;
  Result<void> check_alive() const;
  Error gone() const;
  Error refusal(const char* what, std::uint64_t address, std::uint64_t bytes, int number) const;
  // Touches the pages of [begin, end), at most one huge page; `pages` is /proc/PID/pagemap, or
  // closed where that cannot be read.
  Result<void> touch(const UniqueFd& pages, std::uint64_t begin, std::uint64_t end) const;

  Pid pid_;
  const Pidfd* pidfd_;
  std::uint64_t address_;
  std::uint64_t bytes_;
};

}  // namespace stasis::direct
