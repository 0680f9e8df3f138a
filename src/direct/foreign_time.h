// How long the tool may wait for programs that it is not asked to act on, and that belong to users
// who have nothing to do with those it acts on: any of them may look as if it had an agent that is
// about to answer. One second in all, however many there are and however often one operation looks
// at them; after thirty seconds another.
//
// Thread-safe. Each thread's time counts.
#pragma once

#include <vector>

#include "base/units.h"
#include "proc/procfs.h"

namespace stasis::direct {

// While it lives, the time counts.
class ForeignTime {
 public:
  ForeignTime();
  ForeignTime(const ForeignTime&) = delete;
  ForeignTime& operator=(const ForeignTime&) = delete;
  ~ForeignTime();

  Clock::time_point until() const { return until_; }

 private:
  Clock::time_point begun_ = Clock::now();
  Clock::time_point until_;
};

// Whose processes are waited for as long as their work takes: those of root, of the user who runs
// the tool, and of the owners of `ours`.
class KnownUsers {
 public:
  explicit KnownUsers(const std::vector<proc::ProcessInfo>& ours);

  // A process that has ended belongs to one.
  bool has_owner_of(Pid pid) const;

 private:
  std::vector<unsigned> users_;
};

}  // namespace stasis::direct
