// Where the control groups of a process are to be found.
//
// Reads /proc only; thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace stasis::proc {

struct CgroupDirectory {
  std::string path;
  bool version1 = false;
};

// The directories of a controller ("memory", "pids") that hold the process: its own first, then
// those around it. Of version 1 and version 2 (kernel: Documentation/admin-guide/cgroup-v2.rst,
// cgroup-v1). From inside a container its own can be seen, not those around it. Empty for a process
// that has ended. `proc` is "/proc" but in tests.
std::vector<CgroupDirectory> cgroup_directories(Pid pid, std::string_view controller,
                                                const std::string& proc = "/proc");

// A limit of how many processes and threads there may be (kernel: cgroup-v1/pids.rst).
struct PidsCgroup {
  std::string directory;
  std::uint64_t limit = 0;
  std::uint64_t used = 0;  // in it and below it
  std::uint64_t room() const { return used < limit ? limit - used : 0; }
};

// The limit with the least room among the cgroups that hold the process; nothing if none has a
// limit.
std::optional<PidsCgroup> tightest_pids_cgroup(Pid pid, const std::string& proc = "/proc");

// A cgroup whose processes the kernel keeps from running (docker pause; kernel: cgroup-v2.rst,
// cgroup.freeze, and cgroup-v1/freezer-subsystem.rst).
struct FrozenCgroup {
  std::string directory;
  bool version1 = false;
};

// The cgroup by which the process is frozen; its own where that cannot be seen from here. Nothing
// if it runs.
std::optional<FrozenCgroup> frozen_cgroup(Pid pid, const std::string& proc = "/proc");

// The same for one look at many processes: what is said of a cgroup counts for all in it. One
// thread at a time.
class FrozenCgroups {
 public:
  explicit FrozenCgroups(std::string proc = "/proc") : proc_(std::move(proc)) {}
  std::optional<FrozenCgroup> of(Pid pid);

 private:
  std::string proc_;
  std::map<std::string, std::optional<FrozenCgroup>> known_;  // by /proc/PID/cgroup
};

}  // namespace stasis::proc
