// The directory in which the tools of several nodes meet: one file system that all of them see.
//
// What is in it is the word of those who may write there, and no more is believed than that: a
// regular file, of bounded size, opened without following a link.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Moves. Several threads may read and write at once, each its own names; renew() has it alone.
class GroupDirectory {
 public:
  // Makes it, mode 0700, if it is not there; its parent has to be. kNotPermitted if it belongs to
  // another user than the caller or root, or if others may write to it. kUsage for a path without a
  // name, kIo.
  static Result<GroupDirectory> open(const std::string& path);

  const std::string& path() const { return path_; }

  // The whole text of a file; nothing if there is none. kIo above `limit` bytes, kNotSupported for
  // what is no regular file.
  Result<std::optional<std::string>> read(const std::string& name, std::size_t limit) const;
  // Replaces it as a whole. kIo, kNoSpace.
  Result<void> write(const std::string& name, const std::string& text) const;
  // Makes it, whole, if there is none of that name: true, and it is this caller's. Of all who try
  // at the same time one succeeds, also over NFS (link(2)). `who` tells callers apart.
  Result<bool> claim(const std::string& name, const std::string& who,
                     const std::string& text) const;
  // Not those of write() and claim() that are under way.
  Result<std::vector<std::string>> names() const;

  // Opens the directory that has the path now, or makes it: after another has removed this one.
  Result<void> renew();
  // Removes these files in this order, and the directory if nothing else is in it. Failures are
  // ignored.
  void remove(const std::vector<std::string>& names);

 private:
  GroupDirectory() = default;
  Result<void> put(const std::string& name, const std::string& text) const;

  std::string path_;  // for messages
  std::string name_;  // below
  UniqueFd parent_;   // so that it is found from another mount namespace
  UniqueFd fd_;
};

}  // namespace stasis
