// XXH3-128 with the AVX2 instructions; only for processors that have them.
#pragma once

#include <cstddef>

namespace stasis {

// The digest of `size` bytes in canonical form, 16 bytes, to `digest`.
void xxh3_avx2(const void* data, std::size_t size, unsigned char* digest);
// Adds to `state`, an XXH3_state_t that XXH3_128bits_reset() has begun.
void xxh3_add_avx2(void* state, const void* data, std::size_t size);

}  // namespace stasis
