// An earlier image as the base of a new one: GPU content that it has already is not written again.
// The new image gets a hard link to each data file of which it uses something, so that it is whole
// by itself, whatever becomes of the base. docs/adr/0023-incremental-images.md.
//
// Owns descriptors of the base's folder and data files, its index, and some 16 bytes for each of
// its chunks. Any number of threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "image/content_reader.h"

namespace stasis {

class ContentBase {
 public:
  // Reads all that may be deduplicated, and verifies it: a job that goes on gets its memory back
  // from it. Called while the job runs. kImageIncomplete, kImageCorrupt (manifest or index),
  // kImageVersion, kNotPermitted, kIo, kInterrupted; kNotSupported if there is no content of that
  // kind in it, or in chunks of another size than `chunk_bytes`.
  static Result<std::shared_ptr<const ContentBase>> open(const std::string& image_dir,
                                                         Progress& progress,
                                                         const Interrupt& interrupt,
                                                         std::uint32_t chunk_bytes = kContentChunk,
                                                         ContentKind kind = ContentKind::kGpu);

  ContentKind kind() const { return reader_.kind(); }

  const std::string& path() const { return path_; }  // absolute
  const ContentIndex& index() const { return reader_.index(); }
  // The damaged files; nothing is taken from them.
  const std::vector<Error>& damage() const { return damage_; }

  // Whether a new image may take chunks from this data file: not if most of it is of no use any
  // more, or any of it is damaged. The writer then writes the chunks in use anew, and apart from
  // all others, so that the next file loses less.
  bool gives(std::size_t file) const { return gives_.at(file); }
  // Bytes of the chunks in the files that give.
  std::uint64_t usable_bytes() const { return usable_bytes_; }

  // The number of the chunk, a whole one, that has this digest.
  std::optional<std::uint32_t> find(const BlockDigest& digest) const;

  // Makes `name` in `folder` a hard link to a data file, and opens it for reading. kIo and others
  // where that cannot be: another file system, or one without links; kNotPermitted if another user
  // may write to the file; kImageCorrupt if it is another one by now. On an error there may be a
  // link.
  Result<UniqueFd> link(std::size_t file, const UniqueFd& folder, const std::string& name) const;

 private:
  ContentBase(std::string path, ContentReader reader)
      : path_(std::move(path)), reader_(std::move(reader)) {}
  void enter_chunks();
  void choose_files();
  Result<void> verify(Progress& progress, const Interrupt& interrupt);

  std::string path_;
  ContentReader reader_;
  UniqueFd folder_;
  std::vector<std::uint32_t> table_;  // number of a chunk and 1, by its digest; 0: none
  std::vector<bool> gives_;
  std::vector<std::uint64_t> used_;  // bytes of each data file that its chunks take
  std::uint64_t usable_bytes_ = 0;
  std::vector<Error> damage_;
};

}  // namespace stasis
