// Reads an image: its manifest at once, its content when asked to verify it.
//
// Holds the image's directories open, so that a rename under its feet changes nothing. No link in
// the image is followed. const methods may be called from several threads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "image/content_reader.h"
#include "image/directory.h"
#include "image/manifest.h"

namespace stasis {

class ImageReader {
 public:
  // Opens the directory and reads its manifest. kImageIncomplete if there is no such image (the
  // remedy names leftovers of a dump that did not finish), kImageCorrupt, kImageVersion,
  // kNotPermitted, kIo.
  static Result<ImageReader> open(const std::string& dir);

  const Manifest& manifest() const { return manifest_; }
  const std::string& path() const { return path_; }  // absolute
  const UniqueFd& dir() const { return dir_; }
  const UniqueFd& criu_dir() const { return criu_dir_; }

  // kNotPermitted unless it lies in the folder with this folder_id(); nothing is asked for an empty
  // one.
  Result<void> check_place(const std::string& folder) const;

  bool has_content(ContentKind kind) const { return record_of(kind).has_value(); }
  // The content that the manifest tells of; kInternal if it tells of none. Else the errors of
  // ContentReader::open(), and kImageCorrupt for content of a process that is not in the image.
  Result<ContentReader> open_content(const ContentReadOptions& options = {}) const;

  // Copies a file into log/, which is made if it is missing, under `name` or, if that is taken, one
  // like it, and returns its path. Never writes to a file that was there. kIo, kNotPermitted and
  // kNoSpace where nothing can be written, as on read-only media.
  Result<std::string> save_log(const UniqueFd& file, const std::string& name) const;

  // Takes a moment: all files are there, none too many, and have their sizes; the index of GPU
  // content is whole. kImageCorrupt.
  Result<void> verify_sizes() const;

  // Which files verify() reads. Pages are the bulk of CRIU's files, and no parser looks at them;
  // all else is small and steers CRIU. GPU content is read with kAll only: it is verified by the
  // code that reads it.
  enum class Part { kAll, kPages, kAllButPages };

  // Every byte of these files, with all processors; before that, unless only pages are asked for,
  // the sizes of all. kImageCorrupt names the file and both checksums; kInterrupted.
  Result<void> verify(Progress& progress, const Interrupt& interrupt, Part part = Part::kAll) const;

 private:
  ImageReader() = default;
  const std::optional<ContentRecord>& record_of(ContentKind kind) const {
    return kind == ContentKind::kGpu ? manifest_.content : manifest_.host_content;
  }
  Result<void> verify_content_sizes(ContentKind kind) const;

  std::string path_;
  UniqueFd dir_;
  UniqueFd criu_dir_;
  Manifest manifest_;
};

// A directory that a dump to the same name is filling, or left behind when it was killed:
// "<dir>.partial-...", "<dir>.replaced-..." or "<dir>.swap-...".
struct Leftover {
  std::string path;                // absolute
  InUse in_use = InUse::kUnknown;  // by a dump that is under way
  bool complete =
      false;  // it has a manifest: an image that has lost its name, and not to be deleted
};
// Sorted by path; empty if there are none or the directory cannot be read.
std::vector<Leftover> find_leftovers(const std::string& dir);

struct ClearedLeftovers {
  std::vector<std::string> removed;
  std::vector<Error> failed;  // for each that could not be removed, and stays
};
// Removes what a killed dump has left beside `dir`, once no process uses it; an old image that it
// had put aside gets its name back if no other has it. With `keep_complete`, whole images under a
// temporary name stay where there is none under the final one; and so does what is `needed`, by its
// path.
Result<ClearedLeftovers> clear_leftovers(
    const std::string& dir, bool keep_complete,
    const std::function<bool(const std::string&)>& needed = {});

}  // namespace stasis
