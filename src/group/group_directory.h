// The directory in which the tools of several nodes meet: one file system that all of them see.
//
// What is in it is the word of those who may write there, and no more is believed than that: a
// regular file, of bounded size, opened without following a link.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "group/group_rendezvous.h"

namespace stasis {

class GroupDirectory : public GroupRendezvous {
 public:
  // Makes it, mode 0700, if it is not there; its parent has to be. kNotPermitted if it belongs to
  // another user than the caller or root, or if others may write to it. kUsage for a path without a
  // name, kIo.
  static Result<std::unique_ptr<GroupDirectory>> open(const std::string& path);

  const std::string& place() const override { return path_; }
  std::string when_in_use() const override;
  std::string when_silent() const override;

  // kNotSupported for what is no regular file.
  Result<std::optional<std::string>> read(const std::string& name, std::size_t limit) override;
  Result<void> write(const std::string& name, const std::string& text) override;
  // Also over NFS (link(2)).
  Result<bool> claim(const std::string& name, const std::string& who,
                     const std::string& text) override;
  // Not those of write() and claim() that are under way.
  Result<std::vector<std::string>> names() override;
  // And the directory if nothing else is in it.
  void remove(const std::vector<std::string>& names) override;
  // Opens the directory that has the path now, or makes it: after another has removed this one.
  Result<void> renew() override;

 private:
  GroupDirectory() = default;
  Result<void> put(const std::string& name, const std::string& text) const;

  std::string path_;  // for messages
  std::string name_;  // below
  UniqueFd parent_;   // so that it is found from another mount namespace
  UniqueFd fd_;
};

}  // namespace stasis
