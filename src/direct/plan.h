// How the content of many segments of one GPU is cut into loads: what fits one buffer and is copied
// with one call.
//
// The segments of a GPU are mapped one behind the other in the order of their content, so that any
// part of the mapped range is one copy, however small the segments are: a thousand of 2 MiB cost
// 64 copies of 32 MiB. Only the Content sees where a load crosses a hole of the content. Pure
// computing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "direct/content.h"

namespace stasis::direct {

// A stretch that is contiguous both where it is mapped and in the content.
struct Stretch {
  std::uint64_t mapped = 0;  // offset in the mapped range
  std::uint64_t content = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Stretch&) const = default;
};

// Adds what is mapped right behind the last stretch: to that one if its content follows too.
void append_stretch(std::vector<Stretch>& stretches, const Stretch& next);

// The first `bytes` of what is mapped.
std::vector<Stretch> first_of(std::span<const Stretch> stretches, std::uint64_t bytes);
// What is mapped behind those.
std::vector<Stretch> rest_of(std::span<const Stretch> stretches, std::uint64_t bytes);

// One copy: [mapped, mapped + bytes) of the mapped range, which lies in these stretches.
struct Load {
  std::uint64_t mapped = 0;
  std::uint64_t bytes = 0;
  std::vector<Stretch> parts;  // of which `mapped` is relative to the load's own start
};

// Cuts into loads of `load_bytes`, the last one shorter.
std::vector<Load> loads_of(std::span<const Stretch> stretches, std::uint64_t load_bytes);

// The same for stretches with gaps between them where they are mapped: none crosses one.
std::vector<Load> loads_of_each(std::span<const Stretch> stretches, std::uint64_t load_bytes);

// The size of a load: a whole buffer, or less where that leaves threads without work.
std::uint64_t load_size(std::uint64_t total, unsigned threads, std::uint64_t buffer_bytes);

// Sorts by content. kUsage for a segment without content, of an odd size, beyond 64 bits, or for
// two that share content.
Result<void> sort_and_check(std::vector<Segment>& segments);

// How a ring of equal chunks, each pinned by itself, is divided for a copy.
struct RingShares {
  unsigned threads = 0;            // for each GPU
  std::uint64_t buffer_bytes = 0;  // two for each thread
  unsigned buffers_per_chunk = 1;
};
// Smaller buffers come before fewer threads, down to 1 MiB, and down to 64 KiB before a GPU gets
// no thread. kUsage if not even one thread for each GPU gets its two.
Result<RingShares> share_ring(std::uint64_t chunk_bytes, unsigned chunks, unsigned gpus,
                              unsigned threads);

}  // namespace stasis::direct
