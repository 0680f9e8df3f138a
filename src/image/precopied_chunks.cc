#include "image/precopied_chunks.h"

#include <algorithm>

#include "image/content_format.h"

namespace stasis {

using content_format::page_aligned;

bool PrecopiedChunks::reserve(const BlockDigest& digest) {
  const std::lock_guard lock(mutex_);
  return entries_.try_emplace(digest).second;
}

bool PrecopiedChunks::knows(const BlockDigest& digest) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(digest);
}

bool PrecopiedChunks::has_stored(const BlockDigest& digest) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(digest);
  return found != entries_.end() && found->second.is_stored;
}

void PrecopiedChunks::add(const ContentChunk& chunk) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[chunk.digest];
  entry.chunk = chunk;
  entry.is_stored = true;
}

std::optional<ContentChunk> PrecopiedChunks::use(const BlockDigest& digest) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(digest);
  if (found == entries_.end() || !found->second.is_stored) return std::nullopt;
  found->second.is_used = true;
  return found->second.chunk;
}

std::map<std::uint8_t, PrecopiedChunks::Ranges> PrecopiedChunks::unused() const {
  std::map<std::uint8_t, Ranges> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [digest, entry] : entries_)
      if (entry.is_stored && !entry.is_used)
        all[entry.chunk.file].emplace_back(entry.chunk.position, page_aligned(entry.chunk.stored));
  }
  for (auto& [file, ranges] : all) {
    std::sort(ranges.begin(), ranges.end());
    Ranges joined;
    for (const auto& [position, bytes] : ranges) {
      if (!joined.empty() && joined.back().first + joined.back().second == position)
        joined.back().second += bytes;
      else
        joined.emplace_back(position, bytes);
    }
    ranges = std::move(joined);
  }
  return all;
}

std::uint64_t PrecopiedChunks::used_bytes() const {
  std::uint64_t bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [digest, entry] : entries_)
    if (entry.is_used) bytes += entry.chunk.stored;
  return bytes;
}

}  // namespace stasis
