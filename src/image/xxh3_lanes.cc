#include "image/xxh3_lanes.h"

#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace stasis {
namespace {

constexpr std::uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr std::uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                      0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};
constexpr std::size_t kSecretSize = 192;
// Where in the secret the keys of each use begin.
constexpr std::size_t kScrambleKey = kSecretSize - 64;
constexpr std::size_t kLastKey = kSecretSize - 64 - 7;
constexpr std::size_t kLowKey = 11;
constexpr std::size_t kHighKey = kSecretSize - 64 - 11;

class Secret {
 public:
  // That of seed 0 is the default one.
  Secret() { XXH3_generateSecret_fromSeed(bytes_.data(), 0); }
  std::uint64_t word(std::size_t at) const {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }

 private:
  std::array<unsigned char, kSecretSize> bytes_{};
};

const Secret& secret() {
  static const Secret made;
  return made;
}

std::uint64_t merged(const Xxh3Lanes& lanes, std::size_t key, std::uint64_t start) {
  for (std::size_t i = 0; i < kXxh3Lanes; i += 2) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(lanes[i] ^ secret().word(key + 8 * i)) *
                         (lanes[i + 1] ^ secret().word(key + 8 * i + 8));
    start += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  start ^= start >> 37;
  start *= 0x165667919E3779F9;
  return start ^ (start >> 32);
}

}  // namespace

const std::array<Xxh3LaneKeys, kXxh3Lanes>& xxh3_lane_keys() {
  static const auto made = [] {
    const Xxh3Lanes start{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                          kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
    std::array<Xxh3LaneKeys, kXxh3Lanes> keys;
    for (std::size_t lane = 0; lane < kXxh3Lanes; ++lane) {
      for (std::size_t stripe = 0; stripe < kXxh3Stripes; ++stripe)
        keys[lane].stripes[stripe] = secret().word(8 * (stripe + lane));
      keys[lane].scramble = secret().word(kScrambleKey + 8 * lane);
      keys[lane].last = secret().word(kLastKey + 8 * lane);
      keys[lane].start = start[lane];
    }
    return keys;
  }();
  return made;
}

BlockDigest xxh3_of_lanes(const Xxh3Lanes& lanes, std::uint64_t bytes) {
  const XXH128_hash_t hash{merged(lanes, kLowKey, bytes * kPrime64[0]),
                           merged(lanes, kHighKey, ~(bytes * kPrime64[1]))};
  XXH128_canonical_t form;
  XXH128_canonicalFromHash(&form, hash);
  BlockDigest digest{};
  std::memcpy(digest.data(), form.digest, digest.size());
  return digest;
}

}  // namespace stasis
