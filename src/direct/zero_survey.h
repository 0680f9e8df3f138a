// How much of GPU memory is zeros, seen by the GPU itself: what JAX takes of a GPU, or a server for
// its cache, is hardly touched.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "direct/content.h"
#include "image/checksum.h"

namespace stasis {

// From so much memory on it is worth it to have the GPU compute digests: below, the copy takes
// hardly longer than they do. STASIS_ZEROS_FROM, in bytes, is for tests.
std::uint64_t digests_from();
// From so much on it is worth it to look before host memory is made ready, in a downtime of its
// own of some 30 ms: the kernel gives 16 processors some 12 GiB in a second.
std::uint64_t survey_from();

// A copy out to this copies nothing where the mover computes digests, and counts what is zeros.
class ZeroSurvey final : public direct::Content {
 public:
  static constexpr std::uint64_t kChunk = std::uint64_t{2} << 20;

  std::uint64_t zero_bytes() const { return zeros_ * kChunk; }

  Result<void> write(std::uint64_t, std::span<const std::byte>) override { return {}; }
  Result<void> read(std::uint64_t, std::span<std::byte>) override { return {}; }
  std::uint64_t digest_chunk() const override { return kChunk; }
  Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) override;

 private:
  const direct::Digest zero_ = xxh3(std::vector<std::byte>(kChunk));
  std::atomic<std::uint64_t> zeros_{0};
};

}  // namespace stasis
