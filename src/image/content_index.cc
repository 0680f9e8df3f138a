#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "image/checksum.h"
#include "image/content.h"
#include "image/content_format.h"
#include "image/directory.h"

namespace stasis {
namespace {

using namespace content_format;  // NOLINT(google-build-using-namespace): constants only

static_assert(std::endian::native == std::endian::little, "numbers are copied as they are");

// Without the file's name, which parse_content_index() puts before it.
tl::unexpected<Error> wrong(std::string what) { return corrupt_image(std::move(what)); }

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    out_.insert(out_.end(), from, from + sizeof value);
  }
  void zeros(std::size_t count) { out_.resize(out_.size() + count); }
  std::vector<std::byte>& out() { return out_; }

 private:
  std::vector<std::byte> out_;
};

// Never reads beyond its end: the caller has seen to it that there is enough.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T take() {
    T value{};
    if (bytes_.size() < sizeof value) return value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return value;
  }
  void skip(std::size_t count) { bytes_ = bytes_.subspan(std::min(count, bytes_.size())); }

 private:
  std::span<const std::byte> bytes_;
};

struct Header {
  std::uint32_t chunk_bytes = 0;
  std::uint32_t files = 0;
  std::uint32_t streams = 0;
  std::uint64_t ranges = 0;
  std::uint64_t chunks = 0;
};

Result<Header> read_header(Reader& reader, std::size_t size) {
  if (reader.take<std::array<unsigned char, 8>>() != kMagic) {
    return wrong("it does not begin with STASISGC");
  }
  const auto version = reader.take<std::uint32_t>();
  const auto features = reader.take<std::uint32_t>();
  if (version > kVersion) {
    return fail(ErrorCode::kImageVersion,
                fmt::format("its version is {}, this program reads up to {}", version, kVersion),
                "restore it with the Stasis that wrote it, or a newer one");
  }
  if (version == 0) return wrong("its version is 0");
  if (features != 0) {
    return fail(ErrorCode::kImageVersion,
                fmt::format("it needs the features {:#x}, which this program lacks", features),
                "restore it with the Stasis that wrote it, or a newer one");
  }
  Header header;
  header.chunk_bytes = reader.take<std::uint32_t>();
  header.files = reader.take<std::uint32_t>();
  header.streams = reader.take<std::uint32_t>();
  reader.skip(4);
  header.ranges = reader.take<std::uint64_t>();
  header.chunks = reader.take<std::uint64_t>();
  reader.skip(16);
  if (!valid_chunk_bytes(header.chunk_bytes)) {
    return wrong(fmt::format("{} bytes is no size of a chunk", header.chunk_bytes));
  }
  if (header.files > kMaxFiles) {
    return wrong(fmt::format("{} data files are more than {}", header.files, kMaxFiles));
  }
  if (header.streams == 0 || header.streams > kMaxStreams) {
    return wrong(fmt::format("{} streams, not 1..{}", header.streams, kMaxStreams));
  }
  // Each number alone first, so that the sum cannot overflow.
  const bool fit = header.ranges <= size / kRangeSize && header.chunks <= size / kChunkSize;
  const std::uint64_t tables = fit ? kHeaderSize + header.files * kFileSize +
                                         header.streams * kStreamSize + header.ranges * kRangeSize +
                                         header.chunks * kChunkSize
                                   : 0;
  if (!fit || tables > size - kDigestSize) {
    return wrong(fmt::format("{} ranges and {} chunks are more than fit into its {} bytes",
                             header.ranges, header.chunks, size));
  }
  return header;
}

Result<void> read_files(Reader& reader, const Header& header, ContentIndex& index) {
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < header.files; ++i) {
    const auto size = reader.take<std::uint64_t>();
    if (size > kMaxBytes - total || size % kPage != 0) {
      return wrong(fmt::format("{} bytes is no size of a data file", size));
    }
    total += size;
    index.file_sizes.push_back(size);
  }
  return {};
}

// The streams, and how many ranges each has.
Result<std::vector<std::uint32_t>> read_streams(Reader& reader, const Header& header,
                                                ContentIndex& index) {
  std::vector<std::uint32_t> range_counts;
  std::unordered_set<std::uint32_t> pids;
  std::uint64_t ranges = 0;
  std::uint64_t chunks = 0;
  for (std::uint32_t i = 0; i < header.streams; ++i) {
    const auto pid = reader.take<std::uint32_t>();
    range_counts.push_back(reader.take<std::uint32_t>());
    const auto bytes = reader.take<std::uint64_t>();
    if (pid == 0 || pid > manifest_format::kMaxPid) {
      return wrong(fmt::format("{} is no process number", pid));
    }
    if (!pids.insert(pid).second) return wrong(fmt::format("process {} stands twice", pid));
    if (bytes > kMaxBytes) return wrong(fmt::format("{} bytes cannot be a stream", bytes));
    index.streams.push_back({Pid{static_cast<int>(pid)}, bytes, {}});
    index.first_chunk.push_back(chunks);
    ranges += range_counts.back();
    chunks += index.chunks_of(i);
  }
  if (ranges != header.ranges || chunks != header.chunks) {
    return wrong(fmt::format("it has {} ranges and {} chunks, its streams {} and {}", header.ranges,
                             header.chunks, ranges, chunks));
  }
  return range_counts;
}

Result<void> read_ranges(Reader& reader, const std::vector<std::uint32_t>& counts,
                         ContentIndex& index) {
  for (std::size_t i = 0; i < index.streams.size(); ++i) {
    ContentStream& stream = index.streams[i];
    for (std::uint32_t n = 0; n < counts[i]; ++n) {
      ContentRange range;
      range.offset = reader.take<std::uint64_t>();
      range.bytes = reader.take<std::uint64_t>();
      range.address = reader.take<std::uint64_t>();
      range.gpu.bytes = reader.take<std::array<std::uint8_t, 16>>();
      stream.ranges.push_back(range);
    }
    if (const std::string problem = problem_of(stream); !problem.empty()) return wrong(problem);
  }
  return {};
}

std::string problem_of(const ContentChunk& chunk, std::uint32_t bytes, const ContentIndex& index) {
  if (chunk.encoding == ContentEncoding::kZero) {
    return chunk == ContentChunk() ? "" : "is of zeros and stored all the same";
  }
  if (chunk.encoding > ContentEncoding::kZstd) {
    return fmt::format("has the encoding {}, which does not exist",
                       static_cast<unsigned>(chunk.encoding));
  }
  if (chunk.file >= index.file_sizes.size()) {
    return fmt::format("is in data file {} of {}", chunk.file, index.file_sizes.size());
  }
  const bool raw = chunk.encoding == ContentEncoding::kRaw;
  if (raw ? chunk.stored != bytes : chunk.stored == 0 || chunk.stored >= bytes) {
    return fmt::format("of {} bytes cannot be stored in {}", bytes, chunk.stored);
  }
  const std::uint64_t size = index.file_sizes[chunk.file];
  if (chunk.position % kPage != 0 || chunk.stored > size || chunk.position > size - chunk.stored) {
    return fmt::format("of {} bytes cannot be at {} of a file of {}", chunk.stored, chunk.position,
                       size);
  }
  return {};
}

Result<void> read_chunks(Reader& reader, ContentIndex& index) {
  for (std::size_t i = 0; i < index.streams.size(); ++i) {
    for (std::uint64_t n = 0; n < index.chunks_of(i); ++n) {
      ContentChunk chunk;
      chunk.digest = reader.take<BlockDigest>();
      chunk.position = reader.take<std::uint64_t>();
      chunk.stored = reader.take<std::uint32_t>();
      chunk.encoding = static_cast<ContentEncoding>(reader.take<std::uint8_t>());
      chunk.file = reader.take<std::uint8_t>();
      std::string problem = problem_of(chunk, index.bytes_of(i, n), index);
      if (reader.take<std::uint16_t>() != 0) problem = "has something where 0 should be";
      if (!problem.empty()) {
        return wrong(
            fmt::format("chunk {} of process {} {}", n, index.streams[i].pid.value, problem));
      }
      index.chunks.push_back(chunk);
    }
  }
  return {};
}

}  // namespace

std::string problem_of(const ContentStream& stream) {
  std::uint64_t end = 0;
  for (const ContentRange& range : stream.ranges) {
    if (range.bytes == 0 || range.offset < end || range.offset > stream.bytes ||
        range.bytes > stream.bytes - range.offset) {
      return fmt::format(
          "a range of process {} has {} bytes at {}, behind one that ends at {}, in {} bytes",
          stream.pid.value, range.bytes, range.offset, end, stream.bytes);
    }
    end = range.offset + range.bytes;
  }
  return {};
}

std::string problem_of_host(const ContentStream& stream) {
  std::uint64_t covered = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
  for (const ContentRange& range : stream.ranges) {
    if (range.offset != covered || range.bytes == 0 || range.bytes % kHostUnit != 0 ||
        range.address % kHostUnit != 0 || range.address + range.bytes < range.address ||
        range.gpu != GpuUuid()) {
      return fmt::format("{} bytes of the host memory of process {} belong to no place in it",
                         range.bytes, stream.pid.value);
    }
    covered += range.bytes;
    places.emplace_back(range.address, range.address + range.bytes);
  }
  if (covered != stream.bytes) {
    return fmt::format("the ranges of process {} cover {} of {} bytes of host memory",
                       stream.pid.value, covered, stream.bytes);
  }
  std::sort(places.begin(), places.end());
  for (std::size_t i = 1; i < places.size(); ++i) {
    if (places[i].first >= places[i - 1].second) continue;
    return fmt::format("two parts of the host memory of process {} belong to the same place",
                       stream.pid.value);
  }
  return {};
}

std::vector<std::byte> serialize_content_index(const ContentIndex& index) {
  std::uint64_t ranges = 0;
  for (const ContentStream& stream : index.streams)
    ranges += stream.ranges.size();
  Writer writer;
  writer.out().reserve(kHeaderSize + index.file_sizes.size() * kFileSize +
                       index.streams.size() * kStreamSize + ranges * kRangeSize +
                       index.chunks.size() * kChunkSize + kDigestSize);
  writer.put(kMagic);
  writer.put(kVersion);
  writer.put(std::uint32_t{0});  // features
  writer.put(index.chunk_bytes);
  writer.put(static_cast<std::uint32_t>(index.file_sizes.size()));
  writer.put(static_cast<std::uint32_t>(index.streams.size()));
  writer.zeros(4);
  writer.put(ranges);
  writer.put(static_cast<std::uint64_t>(index.chunks.size()));
  writer.zeros(16);
  for (const std::uint64_t size : index.file_sizes)
    writer.put(size);
  for (const ContentStream& stream : index.streams) {
    writer.put(static_cast<std::uint32_t>(stream.pid.value));
    writer.put(static_cast<std::uint32_t>(stream.ranges.size()));
    writer.put(stream.bytes);
  }
  for (const ContentStream& stream : index.streams) {
    for (const ContentRange& range : stream.ranges) {
      writer.put(range.offset);
      writer.put(range.bytes);
      writer.put(range.address);
      writer.put(range.gpu.bytes);
    }
  }
  for (const ContentChunk& chunk : index.chunks) {
    writer.put(chunk.digest);
    writer.put(chunk.position);
    writer.put(chunk.stored);
    writer.put(static_cast<std::uint8_t>(chunk.encoding));
    writer.put(chunk.file);
    writer.zeros(2);
  }
  return close_content_index(std::move(writer.out()));
}

std::vector<std::byte> close_content_index(std::vector<std::byte> bytes) {
  const BlockDigest digest = xxh3(bytes);
  const auto* from = reinterpret_cast<const std::byte*>(digest.data());
  bytes.insert(bytes.end(), from, from + digest.size());
  return bytes;
}

namespace {

Result<ContentIndex> parse_index(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderSize + kDigestSize) {
    return wrong(fmt::format("{} bytes are too few", bytes.size()));
  }
  if (bytes.size() > kMaxIndex) {
    return wrong(fmt::format("it has {} bytes, more than {}", bytes.size(), kMaxIndex));
  }
  BlockDigest stands{};
  std::memcpy(stands.data(), bytes.last(kDigestSize).data(), kDigestSize);
  const BlockDigest actual = xxh3(bytes.first(bytes.size() - kDigestSize));
  if (stands != actual) {
    return wrong(fmt::format("its checksum is {}, expected {}", to_hex(actual), to_hex(stands)));
  }
  Reader reader(bytes);
  STASIS_TRY_ASSIGN(auto header, read_header(reader, bytes.size()));
  ContentIndex index;
  index.chunk_bytes = header.chunk_bytes;
  STASIS_TRY(read_files(reader, header, index));
  STASIS_TRY_ASSIGN(const auto range_counts, read_streams(reader, header, index));
  STASIS_TRY(read_ranges(reader, range_counts, index));
  index.chunks.reserve(header.chunks);
  STASIS_TRY(read_chunks(reader, index));
  return index;
}

}  // namespace

Result<ContentIndex> parse_content_index(std::span<const std::byte> bytes, ContentKind kind) {
  auto index = parse_index(bytes);
  if (!index) index.error().message = content_index_path(kind) + ": " + index.error().message;
  return index;
}

}  // namespace stasis
