// What the mover copies: pieces of device memory, and where their content goes to and comes from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/fd.h"
#include "base/result.h"

namespace stasis::direct {

inline constexpr std::uint64_t kPage = 4096;

// One piece of device memory, as the driver exports it: cuMemExportToShareableHandle, as a file
// descriptor, of a whole cuMemCreate.
struct Segment {
  UniqueFd handle;
  std::uint64_t bytes = 0;   // the allocation's own size, a multiple of the device's granularity
  std::uint64_t offset = 0;  // of its content in the Content
};

// Of a copy: content from the GPUs, or to them.
enum class Direction { kOut, kIn };

// XXH3-128, in canonical form (big-endian).
using Digest = std::array<unsigned char, 16>;

// Where the content of device memory goes to and comes from. Called from many threads at once, but
// never for the same place from two. A failure ends the copy and is what the copy returns.
class Content {
 public:
  virtual ~Content() = default;
  virtual Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) = 0;

  // Where some of the content is there already: the size of the chunks about which deduplicate()
  // can be asked, a multiple of 1024. 0: there is no point in asking.
  virtual std::uint64_t digest_chunk() const { return 0; }
  // `digests`: those of the whole chunks from `offset` on, in their order; the first byte of each
  // is 1 afterwards if that chunk is there, which then counts as written, and 0 if it is to be
  // written.
  virtual Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) {
    (void)offset;
    for (std::size_t i = 0; i < digests.size(); i += sizeof(Digest))
      digests[i] = std::byte{0};
    return {};
  }

  // Where it is known of some of the content that it is all zeros, and need not be read: the size
  // of the chunks about which zeros() can be asked. 0: there is no point in asking.
  virtual std::uint64_t zero_chunk() const { return 0; }
  // `flags`: one for each whole chunk from `offset` on, 1 afterwards if it is known to be zeros.
  virtual Result<void> zeros(std::uint64_t offset, std::span<std::byte> flags) {
    (void)offset;
    for (std::byte& flag : flags)
      flag = std::byte{0};
    return {};
  }
};

}  // namespace stasis::direct
