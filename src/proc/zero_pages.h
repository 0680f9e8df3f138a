// The zeros that the driver saves when it checkpoints a process.
//
// Driver 580.159.04 on an H100 keeps 527 MiB in the host's memory of an empty context, and 98 to
// 99 % of those pages hold nothing but zeros: CRIU would write them all. A page that is given back
// (MADV_DONTNEED) reads as zeros as well, and is neither written nor read again.
//
// Only what the driver has mapped in that very checkpoint is looked at. The program's own memory
// may be known to another device by its pages (RDMA, io_uring), which it must not lose.
// docs/adr/0026-zeros-of-the-driver.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proc/address_space.h"
#include "proc/procfs.h"

namespace stasis {

struct AddressRange {
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  bool operator==(const AddressRange&) const = default;
};

// Private, writable memory of no file and no name, at addresses where `before` had nothing: the
// kernel makes one mapping of neighbours that are alike, so part of a mapping may be new. Both by
// address, and so is the result.
std::vector<AddressRange> new_memory(std::span<const proc::Mapping> before,
                                     std::span<const proc::Mapping> now);

struct ZeroRun {
  AddressRange range;
  std::uint64_t bytes = 0;  // of pages that are there; between them some never were
  bool operator==(const ZeroRun&) const = default;
};

// Runs of pages within `ranges` that are there and hold nothing but zeros, as long as they are
// worth a system call; by address, and none of them in two of the ranges. The process must not
// write there meanwhile. Reads little of what is mostly other than zero. Empty if it cannot be
// read.
std::vector<ZeroRun> find_zero_runs(const proc::AddressSpace& space,
                                    std::span<const AddressRange> ranges, unsigned threads);

// Drops the zeros of a process that has been checkpointed, and whose threads are parked, by one of
// those. `before`: what it had mapped when they were parked already, and it was not checkpointed.
// Returns how many bytes went. What cannot be dropped stays; there is no error.
std::uint64_t drop_zero_pages(const proc::AddressSpace& space,
                              std::span<const proc::Mapping> before, unsigned threads);

}  // namespace stasis
