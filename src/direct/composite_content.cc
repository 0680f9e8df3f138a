#include "direct/composite_content.h"

#include <algorithm>

namespace stasis {
namespace {

Result<void> nowhere() { return fail(ErrorCode::kInternal, "the mover names unknown content"); }

}  // namespace

CompositeContent::Part* CompositeContent::part_at(std::uint64_t offset) {
  return offset / kGap < parts_.size() ? &parts_[offset / kGap] : nullptr;
}

std::uint64_t CompositeContent::add_buffer(const std::shared_ptr<const proc::AddressSpace>& space,
                                           std::uint64_t address, std::uint64_t bytes,
                                           BufferPages pages) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Buffer* buffer = parts_[i].buffer.get();
    if (buffer != nullptr && buffer->pid == space->pid() && buffer->address == address &&
        buffer->memory.size() == bytes)
      return i * kGap;
  }
  direct::RemoteMemory memory(space, address, bytes);
  if (pages == BufferPages::kFresh) memory.set_fresh();
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
  return part == nullptr ? nowhere() : part->content().write(part->place(offset), bytes);
}

Result<void> CompositeContent::read(std::uint64_t offset, std::span<std::byte> bytes) {
  Part* part = part_at(offset);
  return part == nullptr ? nowhere() : part->content().read(part->place(offset), bytes);
}

namespace {

// What all parts say; 0 if they differ.
template <class Parts, class Ask>
std::uint64_t common(const Parts& parts, Ask ask) {
  if (parts.empty()) return 0;
  const std::uint64_t first = ask(parts.front());
  const bool same =
      std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return ask(part) == first; });
  return same ? first : 0;
}

}  // namespace

std::uint64_t CompositeContent::digest_chunk() const {
  return common(parts_, [](const Part& part) { return part.content().digest_chunk(); });
}

Result<void> CompositeContent::deduplicate(std::uint64_t offset, std::span<std::byte> digests) {
  Part* part = part_at(offset);
  return part == nullptr ? nowhere() : part->content().deduplicate(part->place(offset), digests);
}

std::uint64_t CompositeContent::zero_chunk() const {
  return common(parts_, [](const Part& part) { return part.content().zero_chunk(); });
}

Result<void> CompositeContent::zeros(std::uint64_t offset, std::span<std::byte> flags) {
  Part* part = part_at(offset);
  return part == nullptr ? nowhere() : part->content().zeros(part->place(offset), flags);
}

}  // namespace stasis
