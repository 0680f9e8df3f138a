// Watches of inotify(7) and fanotify(7), as /proc/PID/fdinfo shows them: can CRIU find again what
// they are on?
//
// Reads /proc and opens what is watched without reading it (O_PATH). One thread at a time.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/ids.h"
#include "proc/mounts.h"

namespace stasis {

enum class WatchLight {
  kFine,
  kUnknown,  // could not be tried
  kLost,     // CRIU cannot dump it
  kWhole,    // of a whole file system: CRIU dumps it, and a restore leaves it out
  kDeleted,  // CRIU dumps it, and a restore leaves it out
  kLink,     // of a symbolic link itself: CRIU dumps it, and no restore succeeds
};

struct Watch {
  WatchLight light = WatchLight::kFine;
  std::string what;   // which file: "inode 12 of proc on /proc"
  std::string flags;  // those that a restore does not set: "IN_ONESHOT"
};

class WatchSearch {
 public:
  // The watches of one descriptor, from what its fdinfo says.
  std::vector<Watch> probe(Pid pid, const std::string& fdinfo);

 private:
  const std::vector<proc::Mount>& mounts_of(Pid pid);

  std::map<int, std::vector<proc::Mount>> mounts_;
};

}  // namespace stasis
