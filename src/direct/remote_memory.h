// Private memory of another process as a place for content.
//
// Bound to one address space of the process (proc/address_space.h): a process that becomes another
// program in the middle loses its content, and nothing of the other program is read or written.
// Threads: any number at once.
#pragma once

#include <memory>
#include <utility>

#include "base/fd.h"
#include "base/ids.h"
#include "base/interrupt.h"
#include "direct/content.h"
#include "proc/address_space.h"

namespace stasis::direct {

class RemoteMemory final : public Content {
 public:
  // `bytes` of memory at `address`.
  RemoteMemory(std::shared_ptr<const proc::AddressSpace> space, std::uint64_t address,
               std::uint64_t bytes)
      : space_(std::move(space)), address_(address), bytes_(bytes) {}

  // kProcessGone if the address space is gone, kUsage beyond the range, kIo where the process has
  // no memory (or none that may be written).
  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override;
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override;

  // What a page that was never touched reads as takes no memory: deduplicate() leaves chunks of
  // zeros as they are, and zeros() finds them. Right only where `is_fresh` was said of it: nothing
  // was written there since it was mapped.
  static constexpr std::uint64_t kChunk = std::uint64_t{2} << 20;
  void set_fresh() { is_fresh_ = true; }
  std::uint64_t digest_chunk() const override { return is_fresh_ ? kChunk : 0; }
  Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) override;
  std::uint64_t zero_chunk() const override { return kChunk; }
  Result<void> zeros(std::uint64_t offset, std::span<std::byte> flags) override;

  // Makes the process own every page, so that write() meets no page fault: a first touch is ten
  // times slower than the copy itself. For memory whose content does not matter: what was missing
  // becomes 0. Huge pages are taken where the process's mapping asks for them
  // (MADV_HUGEPAGE) and the kernel has some, and all others one by one.
  Result<void> fault_in(unsigned threads, const Interrupt& interrupt);

  std::uint64_t size() const { return bytes_; }

 private:
  Result<void> check_range(std::uint64_t offset, std::uint64_t bytes) const;
  // Touches the pages of [begin, end), at most one huge page; `pages` is /proc/PID/pagemap, or
  // closed where that cannot be read.
  Result<void> touch(const UniqueFd& pages, std::uint64_t begin, std::uint64_t end) const;

  std::shared_ptr<const proc::AddressSpace> space_;
  std::uint64_t address_;
  std::uint64_t bytes_;
  bool is_fresh_ = false;
};

}  // namespace stasis::direct
