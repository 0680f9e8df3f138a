#include "image/precopied_chunks.h"

#include <algorithm>

#include "image/content_format.h"

namespace stasis {

using content_format::page_aligned;

bool PrecopiedChunks::claim(const BlockDigest& digest) {
  const std::lock_guard lock(mutex_);
  return entries_.try_emplace(digest).second;
}

bool PrecopiedChunks::knows(const BlockDigest& digest) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(digest);
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

std::vector<std::pair<std::uint64_t, std::uint64_t>> PrecopiedChunks::unused(
    std::uint8_t file) const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  const std::lock_guard lock(mutex_);
  for (const auto& [digest, entry] : entries_)
    if (entry.is_stored && !entry.is_used && entry.chunk.file == file)
      ranges.emplace_back(entry.chunk.position, page_aligned(entry.chunk.stored));
  std::sort(ranges.begin(), ranges.end());
  std::size_t kept = 0;
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    auto& last = ranges[kept];
    if (last.first + last.second == ranges[i].first)
      last.second += ranges[i].second;
    else
      ranges[++kept] = ranges[i];
  }
  if (!ranges.empty()) ranges.resize(kept + 1);
  return ranges;
}

std::uint64_t PrecopiedChunks::used_bytes() const {
  std::uint64_t bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [digest, entry] : entries_)
    if (entry.is_used) bytes += entry.chunk.stored;
  return bytes;
}

}  // namespace stasis
