// Host memory of a program that stands still, as far as a tool saves it itself and writes it into
// what CRIU restores: large memory of no file that is private, or of this process alone.
//
// Left to CRIU: memory of files and what processes share, stacks, the beginning of the heap of
// brk(2), small mappings (what the driver's and the agent's own threads use lies there), memory
// that the kernel treats in a special way (locked, huge pages of hugetlbfs, registered with
// userfaultfd, excluded from dumps, device memory), and pages that are swapped out or that a forked
// process shares: those stay shared. docs/adr/0047-host-memory.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "proc/address_space.h"
#include "proc/shared_host_memory.h"
#include "proc/zero_pages.h"

namespace stasis {

// The unit, aligned in the process's addresses: that of the chunks in an image, so that what has
// not changed from one image to the next is one chunk in both.
inline constexpr std::uint64_t kHostBlock = 256U << 10;

struct HostRanges {
  std::vector<AddressRange> ranges;   // by address, each in one mapping or in private ones
  std::vector<SharedMapping> shared;  // the others are of these; by address

  // The one of the range with that address, if it is of one.
  const SharedMapping* shared_at(std::uint64_t address) const;
};

// The blocks of `space` of which at least half of the pages are there. Empty if it cannot be told
// for certain. All threads of the process but the driver's are parked. `objects`: of all processes
// that are dumped, with which it may share memory; it is one of them.
HostRanges find_host_memory(const proc::AddressSpace& space, SharedObjects& objects);

// Of the pages of that process, for read_pages(). kProcessGone, kNotPermitted.
Result<UniqueFd> open_pagemap(const proc::AddressSpace& space);
// Whole pages at `address`; those that are not there read as zeros, and do not come to be there:
// for a plain read the kernel maps its page of zeros, and find_host_memory() takes that for a
// shared one. The errors of AddressSpace::read(). Any number of threads at once.
Result<void> read_pages(const proc::AddressSpace& space, const UniqueFd& pagemap,
                        std::uint64_t address, std::span<std::byte> bytes);
// The same of a part of one of the ranges. Also the errors of read_shared().
Result<void> read_host_memory(const proc::AddressSpace& space, const UniqueFd& pagemap,
                              const HostRanges& found, std::uint64_t address,
                              std::span<std::byte> bytes);

// What find_host_memory() would find, about, if the threads, which run, were parked now.
HostRanges guess_host_memory(const proc::AddressSpace& space, SharedObjects& objects);

}  // namespace stasis
