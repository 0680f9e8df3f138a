// Writes the content of GPU memory of an image, gpu/, or of host memory, host/, from as many
// threads as the caller has:
//
//   create -> add_stream (one for each process) -> write, write, ... -> finish
//
// Each chunk is hashed; one of zeros, or one that is there already in any stream or in the base, is
// not written. Each call of write() takes a data file for itself, so that no two wait for each
// other: there are as many files as there were ever calls at the same time; beside a base fewer if
// there is little to be written.
//
// What it makes stands in the image's directory, which its ImageWriter removes if the image is not
// completed. Owns a descriptor for each data file; 1 MiB for each call at the same time that
// compresses, or gets memory that direct I/O cannot take; and for each chunk some 48 bytes, twice
// as much in finish(). Moves, never copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "image/content.h"
#include "image/content_base.h"
#include "image/manifest.h"
#include "image/unwanted_room.h"

namespace stasis {

enum class ContentCompression { kNone, kLz4, kZstd };
// "none", "lz4" and "zstd"; nothing for any other word.
std::optional<ContentCompression> compression_from_name(std::string_view name);

struct ContentOptions {
  ContentCompression compression = ContentCompression::kNone;
  // Past the page cache, where the file system can; what it cannot goes through it.
  bool direct_io = false;
  SyncPolicy sync = SyncPolicy::kDisk;
  std::uint32_t chunk_bytes = kContentChunk;  // a power of two, 64 KiB to 16 MiB
  // An earlier image, with chunks of the same size, which may be removed when create() is back.
  std::shared_ptr<const ContentBase> base = nullptr;
  ContentKind kind = ContentKind::kGpu;
};

struct ContentSummary {
  ContentRecord record;  // for the manifest
  ContentUse use;        // of all streams
  std::uint64_t chunks = 0;
  std::uint64_t zero_chunks = 0;
  std::uint64_t duplicate_chunks = 0;
  std::uint64_t reused_chunks = 0;    // that are the base's, each counted once, also if moved
  std::uint64_t written_bytes = 0;    // of the data files that no other image has
  std::uint64_t precopied_bytes = 0;  // of these, what precopy() had stored and was wanted
  bool direct_io = false;             // all went past the page cache
  double seconds = 0;                 // from create() to the end of finish()
};

class ContentWriter {
 public:
  // Makes its folder in `image_dir`, an image that is being written: ImageWriter::dir(). kUsage for
  // a chunk size that cannot be; kIo, kNotPermitted, kNoSpace.
  static Result<ContentWriter> create(const UniqueFd& image_dir, const ContentOptions& options);

  ContentWriter(ContentWriter&&) noexcept;
  ContentWriter& operator=(ContentWriter&&) noexcept;
  ~ContentWriter();

  std::uint32_t chunk_bytes() const;

  // Why the base of the options is not used, if it cannot be.
  const std::optional<Error>& without_base() const;

  // The content of a process, `bytes` of it; the first one is stream 0. Before the first write().
  // kUsage for a process that has one already, and for ranges that are not in their order, overlap
  // or are beyond the end.
  Result<void> add_stream(Pid pid, std::uint64_t bytes, std::vector<ContentRange> ranges);

  // Any number of threads at once, but never for the same place twice. `offset`, and `bytes` but at
  // the stream's end, are multiples of chunk_bytes(); kUsage otherwise. The memory is free again on
  // return; if it is aligned to 4096 bytes, direct I/O needs no copy of it. kNoSpace, kIo; after an
  // error there is no image to be had from this writer.
  Result<void> write(std::size_t stream, std::uint64_t offset, std::span<const std::byte> bytes);

  // Stores content that a later write() may have, whole chunks: what it then has of it, it need not
  // store. What no write() has had when finish() comes is take_unwanted_room()'s. Before the first
  // write(); threads and errors as of that. The bytes that it has stored.
  Result<std::uint64_t> precopy(std::span<const std::byte> bytes);
  // How many bytes it would store. Stores nothing.
  std::uint64_t not_precopied(std::span<const std::byte> bytes) const;

  // Of digests as for deduplicate(): the first byte is 1 afterwards where precopy() would store
  // nothing.
  void mark_known(std::span<std::byte> digests) const;

  // The size of the chunks for deduplicate().
  std::uint64_t digest_chunk() const;
  // For a caller that knows the digests of whole chunks (XXH3-128, one behind the other) before it
  // has the chunks: those that are zeros, in the base or pre-copied count as written herewith,
  // and the first byte of their digest is 1 afterwards; that of the others is 0, and they are to be
  // written. Threads and errors as of write().
  Result<void> deduplicate(std::size_t stream, std::uint64_t offset, std::span<std::byte> digests);

  // Once, when no write() runs any more: brings everything to the disk (SyncPolicy::kDisk), then
  // writes the index and syncs that. kInternal if something was never written; what write() failed
  // with, if it did; kInterrupted, kNoSpace, kIo. `progress` is told of the phase "sync content".
  Result<ContentSummary> finish(Progress& progress, const Interrupt& interrupt);
  // After that: of what precopy() has stored in vain.
  UnwantedRoom take_unwanted_room();

 private:
  struct State;
  explicit ContentWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace stasis
