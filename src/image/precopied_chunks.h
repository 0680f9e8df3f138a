// Chunks that were stored before it was known whether they are wanted: content of a program that
// still ran, and may have changed it since. docs/adr/0054-pre-copy.md.
//
// Any number of threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "image/content.h"

namespace stasis {

class PrecopiedChunks {
 public:
  // Whether the caller is to store the chunk: false if it is stored, or another thread is at it.
  bool reserve(const BlockDigest& digest);
  // Whether reserve() would be false.
  bool knows(const BlockDigest& digest) const;
  bool has_stored(const BlockDigest& digest) const;
  // It is stored there, whole.
  void add(const ContentChunk& chunk);

  // Where it lies; it is wanted from now on.
  std::optional<ContentChunk> use(const BlockDigest& digest);

  // Positions and bytes of what is not wanted, by the number of its data file; sorted, neighbours
  // joined.
  using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  std::map<std::uint8_t, Ranges> unused() const;
  // Of those that are.
  std::uint64_t used_bytes() const;

 private:
  struct Entry {
    ContentChunk chunk;
    bool is_stored = false;
    bool is_used = false;
  };
  struct Hash {
    std::size_t operator()(const BlockDigest& digest) const {
      std::size_t value = 0;
      std::memcpy(&value, digest.data(), sizeof value);
      return value;
    }
  };
  mutable std::mutex mutex_;
  std::unordered_map<BlockDigest, Entry, Hash> entries_;
};

}  // namespace stasis
