// Content that lies in several places, as one direct::Content for a mover: host memory of the
// processes themselves, and streams of images. Private to src/direct.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/fd.h"
#include "direct/content.h"
#include "direct/image_content.h"
#include "direct/remote_memory.h"

namespace stasis {

// Whether something may have been written in a buffer since it was mapped (RemoteMemory).
enum class BufferPages { kWritten, kFresh };

// The next place begins at a multiple of kGap, so that no piece lies in two. One thread adds; any
// number of them read and write.
class CompositeContent final : public direct::Content {
 public:
  static constexpr std::uint64_t kGap = ImageContent::kGap;

  // Each adds a place, or finds it, and returns the offset at which it begins.
  std::uint64_t add_buffer(const std::shared_ptr<const proc::AddressSpace>& space,
                           std::uint64_t address, std::uint64_t bytes, BufferPages pages);
  std::uint64_t add_stream(const std::shared_ptr<ImageContent>& image, std::size_t stream);

  // kInternal where there is no place: a process that has failed asks for one.
  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override;
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override;
  std::uint64_t digest_chunk() const override;
  Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) override;
  std::uint64_t zero_chunk() const override;
  Result<void> zeros(std::uint64_t offset, std::span<std::byte> flags) override;

 private:
  struct Buffer {
    Pid pid;
    std::uint64_t address;
    direct::RemoteMemory memory;
  };
  // One or the other.
  struct Part {
    std::unique_ptr<Buffer> buffer;
    std::shared_ptr<ImageContent> image;
    std::size_t stream = 0;

    direct::Content& content() const {
      return buffer ? static_cast<direct::Content&>(buffer->memory) : *image;
    }
    // In that, of an offset of ours.
    std::uint64_t place(std::uint64_t offset) const {
      return (buffer ? 0 : stream * kGap) + offset % kGap;
    }
  };
  Part* part_at(std::uint64_t offset);

  std::vector<Part> parts_;
};

}  // namespace stasis
