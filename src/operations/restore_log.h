// CRIU's directory during a restore, and where its log goes afterwards.
//
// CRIU follows links in the directory it works in, and loads plugins from it; so it gets a fresh
// one below the state directory that only we can write to, and the log is copied from there.
//
// Private to src/operations. Owns the directory, which is removed with it. One thread.
#pragma once

#include <string>

#include "base/fd.h"
#include "image/directory.h"
#include "image/image_reader.h"

namespace stasis {

class RestoreLog {
 public:
  // Also removes what restores that were killed have left. kIo, kNotPermitted, kNoSpace.
  static Result<RestoreLog> create();
  // Does only that.
  static void sweep();
  RestoreLog(RestoreLog&&) noexcept = default;
  RestoreLog& operator=(RestoreLog&&) = delete;
  ~RestoreLog();

  const UniqueFd& directory() const { return directory_; }
  const std::string& name() const { return name_; }

  // Copies the log into the image; returns its path, or nothing if there is no log or the image
  // cannot be written to.
  std::string save(const ImageReader& image) const;
  // The same; into the state directory if need be.
  std::string save_surely(const ImageReader& image) const;

 private:
  RestoreLog() = default;
  DirectoryEntry entry_;
  UniqueFd directory_;
  std::string name_;
};

}  // namespace stasis
