// XXH3-128 (seed 0, default secret) in two parts: the eight accumulators of some data, which can be
// computed elsewhere, side by side, and what is made of them. As xxHash 0.8 has it
// (doc/xxhash_spec.md there), for data of a multiple of 1024 bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "image/checksum.h"

namespace stasis {

inline constexpr std::size_t kXxh3Lanes = 8;
inline constexpr std::size_t kXxh3Stripes = 16;  // of a block: 64 bytes each
inline constexpr std::size_t kXxh3Block = 1024;

// What the computation of one lane needs: the key of each stripe of a block, that of what comes
// between two blocks, that of the very last stripe, and what the accumulator begins with.
struct Xxh3LaneKeys {
  std::array<std::uint64_t, kXxh3Stripes> stripes{};
  std::uint64_t scramble = 0;
  std::uint64_t last = 0;
  std::uint64_t start = 0;
};
const std::array<Xxh3LaneKeys, kXxh3Lanes>& xxh3_lane_keys();

using Xxh3Lanes = std::array<std::uint64_t, kXxh3Lanes>;

// The digest of `bytes` bytes that have these accumulators.
BlockDigest xxh3_of_lanes(const Xxh3Lanes& lanes, std::uint64_t bytes);

}  // namespace stasis
