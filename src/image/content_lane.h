// A data file of GPU content while it is written, and what one call of ContentWriter::write() puts
// into it.
//
// One thread at a time for each lane: who has set `busy`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/fd.h"
#include "image/content.h"
#include "image/content_codec.h"
#include "image/manifest.h"
#include "stasis/result.h"

namespace stasis {

// A data file and all that one call of write() needs.
struct ContentLane {
  std::string path;
  std::uint8_t number = 0;
  UniqueFd file;
  std::uint64_t end = 0;  // where the next chunk goes
  std::uint64_t written_back = 0;
  bool direct = false;
  Workspace workspace;
  std::atomic<bool> busy = true;  // of who made it
};

// Bytes that follow each other both in memory and in the file: what is about to be written.
class ContentBatch {
 public:
  // `chunk_bytes`: the most that add() is given.
  ContentBatch(ContentLane& lane, ContentEncoding encoding, SyncPolicy sync,
               std::size_t chunk_bytes);

  struct Place {
    std::uint64_t position = 0;
    std::uint32_t stored = 0;
    ContentEncoding encoding = ContentEncoding::kRaw;
  };
  // Gives the chunk its place and writes it, compressed if that pays, now or with those after it:
  // `content` stays as it is until flush(). kNoSpace, kIo, kOutOfHostMemory.
  Result<Place> add(std::span<const std::byte> content);

  Result<void> flush();

 private:
  Result<std::span<std::byte>> gathered(std::size_t bytes);
  std::span<const std::byte> pad(std::span<std::byte> room, std::size_t size);
  Result<void> append(std::span<const std::byte> bytes, bool is_gathered);

  ContentLane& lane_;
  ContentEncoding encoding_;
  SyncPolicy sync_;
  std::size_t gather_;        // bytes of the workspace
  std::size_t gathered_ = 0;  // of them that wait to be written
  std::span<const std::byte> waiting_;
};

}  // namespace stasis
