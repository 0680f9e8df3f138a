// libFuzzer's way into the manifest reader; built with clang and STASIS_FUZZ=ON.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "image/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)stasis::parse_manifest(text);
  // With a right checksum, so that the fuzzer gets past it.
  const auto manifest = stasis::parse_manifest(stasis::close_manifest_text(text));
  if (manifest && !stasis::parse_manifest(stasis::serialize_manifest(*manifest))) std::abort();
  return 0;
}
