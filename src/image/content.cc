#include "image/content.h"

#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "image/content_format.h"

namespace stasis {

std::uint32_t ContentIndex::bytes_of(std::size_t stream, std::uint64_t chunk) const {
  const std::uint64_t left = streams[stream].bytes - chunk * chunk_bytes;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(left, chunk_bytes));
}

std::vector<ContentUse> content_use(const ContentIndex& index, std::size_t reused_files) {
  using Place = std::tuple<std::uint8_t, std::uint64_t>;
  struct Use {
    Place place;
    std::uint64_t chunk;
  };
  // Sorted, since a set of many millions takes far more memory.
  std::vector<Use> stored;
  for (std::uint64_t i = 0; i < index.chunks.size(); ++i) {
    const ContentChunk& chunk = index.chunks[i];
    if (chunk.encoding != ContentEncoding::kZero)
      stored.push_back({{chunk.file, chunk.position}, i});
  }
  std::sort(stored.begin(), stored.end(), [](const Use& a, const Use& b) {
    return std::tie(a.place, a.chunk) < std::tie(b.place, b.chunk);
  });
  std::vector<bool> again(index.chunks.size());
  for (std::size_t i = 1; i < stored.size(); ++i)
    again[stored[i].chunk] = stored[i].place == stored[i - 1].place;

  std::vector<ContentUse> uses(index.streams.size());
  for (std::size_t stream = 0; stream < uses.size(); ++stream) {
    ContentUse& use = uses[stream];
    use.bytes = index.streams[stream].bytes;
    for (std::uint64_t i = 0; i < index.chunks_of(stream); ++i) {
      const std::uint64_t number = index.first_chunk[stream] + i;
      const ContentChunk& chunk = index.chunks[number];
      if (chunk.encoding == ContentEncoding::kZero) {
        use.zero_bytes += index.bytes_of(stream, i);
      } else if (again[number]) {
        use.duplicate_bytes += index.bytes_of(stream, i);
      } else {
        use.stored_bytes += chunk.stored;
        use.room_bytes += content_format::page_aligned(chunk.stored);
        if (chunk.file + reused_files >= index.file_sizes.size()) use.reused_bytes += chunk.stored;
      }
    }
  }
  return uses;
}

ContentUse sum(const std::vector<ContentUse>& uses) {
  ContentUse all;
  for (const ContentUse& use : uses) {
    all.bytes += use.bytes;
    all.zero_bytes += use.zero_bytes;
    all.duplicate_bytes += use.duplicate_bytes;
    all.stored_bytes += use.stored_bytes;
    all.reused_bytes += use.reused_bytes;
    all.room_bytes += use.room_bytes;
  }
  return all;
}

const char* content_folder(ContentKind kind) { return kind == ContentKind::kGpu ? "gpu" : "host"; }

std::string content_index_path(ContentKind kind) {
  return fmt::format("{}/{}", content_folder(kind), content_format::kIndexName);
}

std::string content_data_path(ContentKind kind, std::size_t file) {
  return fmt::format("{}/data-{:02}", content_folder(kind), file);
}

}  // namespace stasis
