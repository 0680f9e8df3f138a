// Writes an image: under a temporary name beside the final one, checksummed, synced, and only then
// under its name, so that an image is complete or does not exist.
//
//   create -> (CRIU writes into criu_dir, a ContentWriter into gpu/) -> seal -> (CRIU ends the
//   tree)
//   -> commit
//
// Between seal and commit the new image stands under its final name, and what it replaced is kept
// aside; discard(), and the destructor if commit() was not reached, undo everything: the temporary
// directory goes away (and only it), and a replaced image is put back. CRIU's log of a failed dump
// is kept as failed_log_path().
//
// Owns the temporary directory. Moves, never copies. One thread at a time; seal() uses threads of
// its own and has joined them when it returns.
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "image/manifest.h"

namespace stasis {

class ImageWriter {
 public:
  // `final_dir` must not exist, or be an empty directory. With `overwrite` it may also be a Stasis
  // image; any other directory is refused even then, a damaged image included: it could be a user's
  // work. kImageExists, kIo, kNotPermitted, kNoSpace.
  // With `folder`, a folder_id(), only in that folder: kNotPermitted if the way to `final_dir`
  // leads to another one, also when the image is to get its name.
  static Result<ImageWriter> create(const std::string& final_dir, bool overwrite,
                                    const std::string& folder = {});

  // Whether create() would begin, with the same errors; nothing is made. Returns the absolute path.
  static Result<std::string> probe(const std::string& final_dir, bool overwrite,
                                   const std::string& folder = {});

  ImageWriter(ImageWriter&&) noexcept;
  ImageWriter& operator=(ImageWriter&&) noexcept;
  ~ImageWriter();

  const UniqueFd& dir() const;       // the image's own: for a ContentWriter
  const UniqueFd& criu_dir() const;  // for CRIU's images: DIR/criu
  const UniqueFd& log_dir() const;   // for CRIU's log and statistics: DIR/log

  std::string path() const;               // absolute: temporary before seal(), final after it
  const std::string& final_path() const;  // absolute
  // Where the log of a failed dump is kept: "<final_path>.failed-dump.log".
  std::string failed_log_path() const;

  // Digests what CRIU has written of its pages files so far, for seal() to find most of its work
  // done: CRIU only ever appends to them (splice, criu/page-xfer.c), and the last blocks are left
  // to seal() in any case. To be called while CRIU writes, from one thread, until `stop` is
  // requested; never at the same time as another call. What goes wrong here is left to seal(), too.
  void prefetch_digests(const std::stop_token& stop);

  // Checksums all that CRIU wrote, sees to it that GPU content is there exactly as the manifest's
  // `content` says (a ContentWriter has checksummed and synced it), makes it durable
  // (SyncPolicy::kDisk), writes the manifest and gives the image its name. Fills in created (if
  // empty), sync, files and total_bytes; adds the phases "checksums" and, if synced, "sync". If it
  // fails, everything is as before create(). kNoSpace with the figures, kInterrupted, kIo,
  // kImageExists (the name was taken meanwhile).
  Result<Manifest> seal(Manifest manifest, SyncPolicy sync, Progress& progress,
                        const Interrupt& interrupt);

  // After a seal() with SyncPolicy::kDeferred and before commit(): brings all files, those with GPU
  // content too, and the image's name to the disk, in the phase "sync". kIo, kNoSpace,
  // kInterrupted: the image may be torn after a loss of power.
  Result<void> sync(Progress& progress, const Interrupt& interrupt);
  // Whether there was an image by this name, which is gone only after commit().
  bool replaces() const;

  // After seal(): the image stays, what it replaced is deleted. An error here means only that the
  // old image's leftovers could not be deleted; the new image is complete.
  Result<void> commit();

  // Undoes everything, also after seal(). Nothing to do after commit(). An error names what is
  // left.
  Result<void> discard();

  // While it is to be kept, no file is removed, whatever fails, and not by the destructor either:
  // the content of a running job's memory is in one of them and nowhere else. The old image still
  // gets its name back.
  void keep_partial(bool keep);

 private:
  struct State;
  explicit ImageWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace stasis
