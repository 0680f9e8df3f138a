// What is mounted where a process is.
//
// Reads /proc only; thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

struct Mount {
  int id = 0;  // as in the "mnt_id" of /proc/PID/fdinfo
  unsigned major = 0;
  unsigned minor = 0;
  std::string root;          // what of the file system is seen there
  std::string point;         // as the process sees it, from its root
  std::string type;          // "ext4"
  std::string options = {};  // of the file system: "rw,errors=remount-ro"
};

// In the mount namespace of a process, as far as its root lets it see them: "12", or "self".
// kNotPermitted, kNoSuchProcess, kIo.
Result<std::vector<Mount>> mounts(const std::string& process, const std::string& proc = "/proc");

// The same, read again only where the kernel says that some mount has changed: a process may have a
// hundred thousand of them, and as many files on them. Null if they cannot be read.
std::shared_ptr<const std::vector<Mount>> known_mounts(Pid process);
// What is kept for that holds the namespace of the process that was asked for last.
void forget_mounts();

}  // namespace stasis::proc
