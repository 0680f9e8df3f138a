// Compiled for AVX2, whatever the rest is compiled for. So it includes nothing but xxHash, which is
// static here: a function of the standard library that is inlined elsewhere might be linked from
// here, and then run on a processor without AVX2.
#include "image/xxh3_avx2.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace stasis {

void xxh3_avx2(const void* data, std::size_t size, unsigned char* digest) {
  XXH128_canonical_t form;
  XXH128_canonicalFromHash(&form, XXH3_128bits(data, size));
  for (std::size_t i = 0; i < sizeof form.digest; ++i)
    digest[i] = form.digest[i];
}

void xxh3_add_avx2(void* state, const void* data, std::size_t size) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), data, size);
}

}  // namespace stasis
