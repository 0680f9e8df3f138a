// The table by which the tool keeps pages of processes from criu, and hears of what criu was kept
// from: shared memory between the tool (src/criu/inside_criu.h) and the library that it loads into
// criu (plugins/inside_criu/).
//
// The tool makes it before criu starts and gives criu the descriptor. The library says that it is
// there; the tool then writes the ranges and, last, their count, and never changes them. It may
// write them while criu is at work: as long as `is_awaited` says so, criu waits for them at its
// first look at the pages of a process. Header only; no dependency but the C library.
#pragma once

#include <atomic>
#include <cstdint>

namespace stasis::inside_criu {

// Of criu's environment: the number of the table's descriptor there.
inline constexpr const char* kDescriptorVariable = "STASIS_INSIDE_CRIU";

// Of a criu that restores: it binds sockets also to addresses that the machine does not have. There
// is no table then.
inline constexpr const char* kBindVariable = "STASIS_INSIDE_CRIU_BINDS";

// Of an owner that is no process but an object of shared memory, with its inode's number.
inline constexpr std::uint64_t kObject = std::uint64_t{1} << 63;

// Pages of a process, named by its number in criu's /proc, or of an object (kObject).
struct Range {
  std::uint64_t owner;
  std::uint64_t start;  // an address, or a place in the object: multiples of a page
  std::uint64_t end;
};

// All zero at first. The ranges lie sorted by owner and place, and none overlap.
struct Table {
  std::atomic<std::uint64_t> is_heard;    // 1: the library reads the table
  std::atomic<std::uint64_t> count;       // of the ranges
  std::atomic<std::uint64_t> hidden;      // pages that criu has asked for and not seen, about
  std::atomic<std::uint64_t> is_asked;    // 1: criu has looked at pages of a process since
  std::atomic<std::uint64_t> tiles_of;    // a thread that criu was kept from: it has AMX tiles
  std::atomic<std::uint64_t> is_awaited;  // 1: the ranges are to come
  Range ranges[1];                        // as many as there is room for
};

// Of the table. The pages of it that nothing was written to take no memory.
inline constexpr std::uint64_t kTableBytes = 64U << 20;
inline constexpr std::uint64_t kMostRanges = (kTableBytes - sizeof(Table)) / sizeof(Range);

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace stasis::inside_criu
