// Names, sizes and limits of gpu/ and host/ that their writer and reader share;
// docs/image-format.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "image/manifest_format.h"

namespace stasis::content_format {

inline constexpr const char* kIndexName = "index";

inline constexpr std::array<unsigned char, 8> kMagic = {'S', 'T', 'A', 'S', 'I', 'S', 'G', 'C'};
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::uint64_t kMaxIndex = std::uint64_t{1} << 30;

inline constexpr std::uint32_t kMinChunk = 64U << 10;
inline constexpr std::uint32_t kMaxChunk = 16U << 20;
inline constexpr std::uint64_t kPage = 4096;  // to which stored chunks are aligned
inline constexpr std::size_t kMaxFiles = manifest_format::kMaxDataFiles;
// Of them, those that an image writes itself if it has a base: of new content, and of what it moves
// out of the base's files.
inline constexpr std::size_t kNewFiles = 16;
inline constexpr std::size_t kMovedFiles = 4;
inline constexpr std::size_t kMaxStreams = 65536;
inline constexpr std::uint64_t kMaxBytes = manifest_format::kMaxInteger;

inline constexpr std::size_t kHeaderSize = 64;
inline constexpr std::size_t kFileSize = 8;
inline constexpr std::size_t kStreamSize = 16;
inline constexpr std::size_t kRangeSize = 40;
inline constexpr std::size_t kChunkSize = 32;
inline constexpr std::size_t kDigestSize = 16;

constexpr bool valid_chunk_bytes(std::uint64_t bytes) {
  return bytes >= kMinChunk && bytes <= kMaxChunk && (bytes & (bytes - 1)) == 0;
}
constexpr std::uint64_t page_aligned(std::uint64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace stasis::content_format
