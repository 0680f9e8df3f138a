// Which chunks of an image that is being written are those of its base, and which data files that
// needs.
//
// Owns a descriptor for each of those files. find() from any number of threads at once; the rest
// from one, when no thread writes any more.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "image/content_base.h"
#include "image/content_lane.h"

namespace stasis {

class ReusedChunks {
 public:
  // Makes a hard link in `folder`, which outlives this, to each data file of the base that gives,
  // under a name of the time. On an error none is left.
  static Result<std::unique_ptr<ReusedChunks>> create(std::shared_ptr<const ContentBase> base,
                                                      const UniqueFd& folder);

  struct Found {
    std::uint32_t number = 0;  // of the base's chunk
    bool gives = false;        // it may be reused, and is herewith
    bool first = false;        // for the first time
    std::uint32_t stored = 0;  // bytes
  };
  std::optional<Found> find(const BlockDigest& digest);
  // Whether find() would let it be reused.
  bool gives(const BlockDigest& digest) const;

  // Files of which nothing is reused go away; what is reused of those that would be kept for almost
  // nothing is copied. The others get the names of data files, from number `lanes.count()` on.
  // kIo, kImageCorrupt, kNoSpace, kInterrupted.
  Result<void> settle(ContentLanes& lanes, SyncPolicy sync, Progress& progress,
                      const Interrupt& interrupt);

  // After settle(): where a chunk that was reused lies now.
  ContentChunk place_of(std::uint32_t number) const;
  // The files that stay, in the order of their numbers.
  struct File {
    std::string path;
    std::uint64_t bytes = 0;
    const UniqueFd* file = nullptr;
  };
  std::vector<File> files() const;
  const ContentBase& base() const { return *base_; }

 private:
  ReusedChunks(std::shared_ptr<const ContentBase> base, const UniqueFd& folder)
      : base_(std::move(base)),
        folder_(&folder),
        used_(base_->index().chunks.size()),
        links_(base_->index().file_sizes.size()) {}
  void unlink(std::size_t file);
  Result<void> move_chunks(std::size_t file, const std::vector<std::uint32_t>& chunks,
                           ContentLanes& lanes, SyncPolicy sync);

  struct Link {
    UniqueFd file;
    std::string name;  // in the folder; empty: there is none
    std::uint8_t number = 0;
  };
  std::shared_ptr<const ContentBase> base_;
  const UniqueFd* folder_;
  std::vector<std::atomic<bool>> used_;  // of each chunk
  std::vector<Link> links_;              // of each data file
  std::unordered_map<std::uint32_t, ContentChunk> moved_;
  std::mutex moving_;
};

}  // namespace stasis
