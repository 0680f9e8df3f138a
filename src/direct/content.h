// What the mover moves: pieces of device memory, and where their content goes to and comes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/fd.h"
#include "stasis/result.h"

namespace stasis::direct {

inline constexpr std::uint64_t kPage = 4096;

// One piece of device memory, as the driver exports it: cuMemExportToShareableHandle, as a file
// descriptor, of a whole cuMemCreate.
struct Segment {
  UniqueFd handle;
  std::uint64_t bytes = 0;   // the allocation's own size, a multiple of the device's granularity
  std::uint64_t offset = 0;  // of its content in the Content
};

// Where the content of device memory goes to and comes from. Called from many threads at once, but
// never for the same place from two. A failure ends the copy and is what the copy returns.
class Content {
 public:
  virtual ~Content() = default;
  virtual Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) = 0;
};

}  // namespace stasis::direct
