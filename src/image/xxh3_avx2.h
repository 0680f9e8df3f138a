// XXH3-128 with the AVX2 instructions; only for processors that have them.
#pragma once

#include <cstddef>

namespace stasis {

// The digest of `size` bytes in canonical form, 16 bytes, to `digest`.
void xxh3_avx2(const void* data, std::size_t size, unsigned char* digest);

}  // namespace stasis
