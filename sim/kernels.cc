#include "sim/kernels.h"

#include <array>

namespace stasis::sim {
namespace {

// src/direct/gpu_digest.cu: eight lanes of XXH3 for each chunk.
struct LaneKeys {
  std::array<std::uint64_t, 16> stripes;
  std::uint64_t scramble;
  std::uint64_t last;
  std::uint64_t start;
};

void xxh3_lanes(const Launch&, void** args) {
  const auto* data = *static_cast<const std::uint64_t**>(args[0]);
  const auto* keys = *static_cast<const LaneKeys**>(args[1]);
  const auto chunks = *static_cast<std::uint64_t*>(args[2]);
  const auto blocks = *static_cast<std::uint64_t*>(args[3]);
  auto* out = *static_cast<std::uint64_t**>(args[4]);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk, out += 8) {
    for (int lane = 0; lane < 8; ++lane)
      out[lane] = keys[lane].start;
    for (std::uint64_t number = 0; number < blocks; ++number) {
      const bool end = number + 1 == blocks;
      for (std::size_t stripe = 0; stripe < 16; ++stripe, data += 8) {
        for (int lane = 0; lane < 8; ++lane) {
          const LaneKeys& key = keys[lane];
          const auto mixed = data[lane] ^ (end && stripe == 15 ? key.last : key.stripes[stripe]);
          out[lane] += data[lane ^ 1] + (mixed & 0xffffffff) * (mixed >> 32);
        }
      }
      for (int lane = 0; lane < 8 && !end; ++lane) {
        out[lane] ^= out[lane] >> 47;
        out[lane] ^= keys[lane].scramble;
        out[lane] *= 0x9E3779B1;
      }
    }
  }
}

}  // namespace

KernelFunction* built_in_kernel(std::string_view name) {
  return name == "stasis_xxh3_lanes" ? &xxh3_lanes : nullptr;
}

}  // namespace stasis::sim
