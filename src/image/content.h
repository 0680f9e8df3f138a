// The content of GPU memory in an image, gpu/, and of host memory, host/: what their writer and
// their reader share. docs/image-format.md is the specification.
//
// Content is cut into streams, one for each process, and these into chunks of one size. Plain
// values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/cuda_state.h"
#include "base/ids.h"
#include "base/result.h"
#include "image/checksum.h"

namespace stasis {

// Of the chunks that our writer makes (docs/adr/0018-content-store.md); a reader takes any.
inline constexpr std::uint32_t kContentChunk = 256U << 10;

// Memory of which an image has the content, apart from what is in CRIU's files.
enum class ContentKind { kGpu, kHost };
// The folder of its files in the image: "gpu", "host".
const char* content_folder(ContentKind kind);
std::string content_index_path(ContentKind kind);                   // "gpu/index"
std::string content_data_path(ContentKind kind, std::size_t file);  // "gpu/data-07"

// What part of a process's memory lies where in its stream. Of GPU memory it is for people
// and other readers, and nothing depends on it; of host memory it says where the content belongs.
struct ContentRange {
  std::uint64_t offset = 0;  // in the stream, bytes
  std::uint64_t bytes = 0;
  GpuUuid gpu;                // of host memory all zero
  std::uint64_t address = 0;  // in the process
  bool operator==(const ContentRange&) const = default;
};

struct ContentStream {
  Pid pid;
  std::uint64_t bytes = 0;
  std::vector<ContentRange> ranges;  // by offset, not overlapping
  bool operator==(const ContentStream&) const = default;
};

enum class ContentEncoding : std::uint8_t { kZero = 0, kRaw = 1, kLz4 = 2, kZstd = 3 };

// Where a chunk is. One of zeros is nowhere: all is 0.
struct ContentChunk {
  BlockDigest digest{};        // of the content, not of what is stored
  std::uint64_t position = 0;  // in the data file, a multiple of 4096
  std::uint32_t stored = 0;    // bytes there
  ContentEncoding encoding = ContentEncoding::kZero;
  std::uint8_t file = 0;  // number of the data file
  bool operator==(const ContentChunk&) const = default;
};

// All that the file gpu/index says.
struct ContentIndex {
  std::uint32_t chunk_bytes = kContentChunk;
  std::vector<std::uint64_t> file_sizes;  // of the data files, by number
  std::vector<ContentStream> streams;
  std::vector<ContentChunk> chunks;        // of all streams, one stream after the other
  std::vector<std::uint64_t> first_chunk;  // of each stream, in `chunks`
  bool operator==(const ContentIndex&) const = default;

  std::uint64_t chunks_of(std::size_t stream) const {
    return (streams[stream].bytes + chunk_bytes - 1) / chunk_bytes;
  }
  // Bytes of content of a stream's chunk: less than chunk_bytes only for the last one.
  std::uint32_t bytes_of(std::size_t stream, std::uint64_t chunk) const;
};

// How much of something there is, and what it takes in the image. What is stored once for several
// chunks counts with the first of them.
struct ContentUse {
  std::uint64_t bytes = 0;            // of content
  std::uint64_t zero_bytes = 0;       // of it in chunks of zeros, which take nothing
  std::uint64_t duplicate_bytes = 0;  // of it in chunks that are stored already
  std::uint64_t stored_bytes = 0;     // of the rest, in the data files; without padding
  std::uint64_t reused_bytes = 0;     // of these, in data files of an earlier image
  std::uint64_t room_bytes = 0;       // of the data files, for stored_bytes with padding
  bool operator==(const ContentUse&) const = default;
};
// For each stream. `reused_files`: so many, the last ones, are those of an earlier image.
std::vector<ContentUse> content_use(const ContentIndex& index, std::size_t reused_files = 0);
ContentUse sum(const std::vector<ContentUse>& uses);

// The bytes of gpu/index, with its closing checksum. Cannot fail.
std::vector<std::byte> serialize_content_index(const ContentIndex& index);

// Adds the checksum that bytes without it close with (tests, fuzzer).
std::vector<std::byte> close_content_index(std::vector<std::byte> bytes);

// What is wrong with a stream's ranges; empty if nothing is.
std::string problem_of(const ContentStream& stream);
// The same of host memory, whose ranges say where the content belongs: they cover the stream, one
// behind the other, in whole units, and none lies over another one in the process.
inline constexpr std::uint64_t kHostUnit = 256U << 10;
std::string problem_of_host(const ContentStream& stream);

// Reads them from an untrusted source: never trusts a number. kImageCorrupt if anything is damaged
// or out of range; kImageVersion if it is whole, but of a newer version or with a feature this
// reader lacks.
Result<ContentIndex> parse_content_index(std::span<const std::byte> bytes,
                                         ContentKind kind = ContentKind::kGpu);

}  // namespace stasis
