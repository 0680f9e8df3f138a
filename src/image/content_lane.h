// The data files of GPU content while they are written, and what one call of ContentWriter::write()
// puts into one.
// One thread at a time for each lane: the one that has set `busy`. ContentLanes from any number.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/result.h"
#include "image/content.h"
#include "image/content_codec.h"
#include "image/content_format.h"
#include "image/manifest.h"

namespace stasis {

// A lane takes either chunks that are likely to change again, or chunks that have not changed for
// some images, so that a file is not kept for a few old chunks: chunks of the first kind will soon
// be of no use.
enum class LaneKind : std::uint8_t { kNew, kMoved };

// A data file and all that one call of write() needs.
struct ContentLane {
  std::string path;
  std::uint8_t number = 0;
  LaneKind kind = LaneKind::kNew;
  UniqueFd file;
  std::uint64_t end = 0;  // where the next chunk goes
  std::uint64_t written_back = 0;
  std::uint64_t counted = 0;  // of `end`, in what ContentLanes knows
  bool direct = false;
  Workspace workspace;
  std::atomic<bool> busy = true;  // for its maker
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

// As many as there were ever calls at the same time. Beside a base, whose files take part of the
// numbers, they become more only as more is written.
class ContentLanes {
 public:
  // `folder` outlives this. Once, before anything else.
  void open(const UniqueFd& folder, ContentKind kind, bool direct_io, bool beside_base);

  // One that is free, for the caller alone until give_back(); waits for one if there may not be
  // more. A caller that has one may not take another. kIo, kNotPermitted, kNoSpace.
  Result<ContentLane*> take(LaneKind kind);
  void give_back(ContentLane& lane);

  // When all are given back.
  std::size_t count() const { return count_; }
  ContentLane& operator[](std::size_t number) { return *lanes_.at(number); }
  const ContentLane& operator[](std::size_t number) const { return *lanes_.at(number); }

 private:
  struct OfKind {
    std::size_t count = 0;
    std::atomic<std::uint64_t> bytes = 0;  // in those given back
  };
  bool may_grow(LaneKind kind) const;
  Result<ContentLane*> make(LaneKind kind);
  ContentLane* wait_for(LaneKind kind, std::size_t own);

  const UniqueFd* folder_ = nullptr;
  ContentKind kind_ = ContentKind::kGpu;
  bool direct_io_ = false;
  bool beside_base_ = false;
  std::mutex growing_;
  std::array<std::unique_ptr<ContentLane>, content_format::kMaxFiles> lanes_;
  std::atomic<std::size_t> count_ = 0;
  std::array<OfKind, 2> kinds_;
};

}  // namespace stasis
