// Where the tools of several nodes meet: named records that all of them see, each replaced as a
// whole. A directory of a shared file system is one (group_directory.h), a tool that serves the
// others by TCP another (rendezvous/tcp_rendezvous.h).
//
// Several threads may read and write at once, each its own names; renew() has it alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace stasis {

// Of one record, and of all their names: no group of 1024 parts has more.
inline constexpr std::size_t kMostGroupRecord = 8 << 20;
inline constexpr std::size_t kMostGroupNames = 8192;

class GroupRendezvous {
 public:
  GroupRendezvous() = default;
  GroupRendezvous(const GroupRendezvous&) = delete;
  GroupRendezvous& operator=(const GroupRendezvous&) = delete;
  virtual ~GroupRendezvous() = default;

  // As the user has named it.
  virtual const std::string& place() const = 0;
  // What the user is to do where it stays in use by another operation, and where it does not
  // answer.
  virtual std::string when_in_use() const = 0;
  virtual std::string when_silent() const = 0;

  // The whole text of a record; nothing if there is none. kIo above `limit` bytes.
  virtual Result<std::optional<std::string>> read(const std::string& name, std::size_t limit) = 0;
  // Replaces it as a whole. kIo, kNoSpace.
  virtual Result<void> write(const std::string& name, const std::string& text) = 0;
  // Makes it, whole, if there is none of that name: true, and it is this caller's. Of all who try
  // at the same time one succeeds. `who` tells callers apart.
  virtual Result<bool> claim(const std::string& name, const std::string& who,
                             const std::string& text) = 0;
  virtual Result<std::vector<std::string>> names() = 0;
  // Removes these in this order. Failures are ignored.
  virtual void remove(const std::vector<std::string>& names) = 0;

  // Finds anew what has the place now: before this part has joined, and after another operation has
  // ended there. kNotPermitted: to try again is of no use.
  virtual Result<void> renew() = 0;
  // This part has joined; it may start threads.
  virtual Result<void> joined() { return {}; }
  // Whether this part removes the records when all parts have heard the outcome.
  virtual bool cleans_up() const { return true; }
  // Whether the others come to this part for the records: then it stays until they have heard the
  // outcome.
  virtual bool serves_others() const { return false; }
  // Of such a part: whether another one has come in the last second.
  virtual bool is_needed() { return false; }
  // Nothing is asked for after that.
  virtual void leave() {}
};

}  // namespace stasis
