#include "direct/composite_content.h"

#include <algorithm>

namespace stasis {
namespace {

Result<void> nowhere() {
  return fail(ErrorCode::kInternal, "the mover names content that there is not");
}

}  // namespace

CompositeContent::Part* CompositeContent::part_at(std::uint64_t offset) {
  return offset / kGap < parts_.size() ? &parts_[offset / kGap] : nullptr;
}

std::uint64_t CompositeContent::add_buffer(const std::shared_ptr<const proc::AddressSpace>& space,
                                           std::uint64_t address, std::uint64_t bytes) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Buffer* buffer = parts_[i].buffer.get();
    if (buffer != nullptr && buffer->pid == space->pid() && buffer->address == address &&
        buffer->memory.size() == bytes)
      return i * kGap;
  }
  const direct::RemoteMemory memory(space, address, bytes);
  parts_.push_back({std::make_unique<Buffer>(Buffer{space->pid(), address, memory}), {}, 0});
  return (parts_.size() - 1) * kGap;
}

std::uint64_t CompositeContent::add_stream(const std::shared_ptr<ImageContent>& image,
                                           std::size_t stream) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].image == image && parts_[i].stream == stream) return i * kGap;
  }
  parts_.push_back({{}, image, stream});
  return (parts_.size() - 1) * kGap;
}

Result<void> CompositeContent::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  Part* part = part_at(offset);
  if (part == nullptr) return nowhere();
  return part->buffer ? part->buffer->memory.write(offset % kGap, bytes)
                      : part->image->write(part->stream * kGap + offset % kGap, bytes);
}

Result<void> CompositeContent::read(std::uint64_t offset, std::span<std::byte> bytes) {
  Part* part = part_at(offset);
  if (part == nullptr) return nowhere();
  return part->buffer ? part->buffer->memory.read(offset % kGap, bytes)
                      : part->image->read(part->stream * kGap + offset % kGap, bytes);
}

// They are all of the same image.
std::uint64_t CompositeContent::digest_chunk() const {
  const bool images = std::all_of(parts_.begin(), parts_.end(),
                                  [](const Part& part) { return part.image != nullptr; });
  return images && !parts_.empty() ? parts_.front().image->digest_chunk() : 0;
}

Result<void> CompositeContent::take(std::uint64_t offset, std::span<std::byte> digests) {
  Part* part = part_at(offset);
  if (part == nullptr || !part->image) return nowhere();
  return part->image->take(part->stream * kGap + offset % kGap, digests);
}

}  // namespace stasis
