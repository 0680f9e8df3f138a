// How much more memory a process may take before the limit of a memory cgroup has it killed: that
// of its container, its pod or its job.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"

namespace stasis::proc {

struct MemoryCgroup {
  std::string directory;
  std::uint64_t limit = 0;  // bytes
  std::uint64_t used = 0;   // without what the kernel gives up first: page cache, caches of its own
  std::uint64_t swap = 0;   // how much more of it may be swapped out

  // `swap_free`: of the whole machine.
  std::uint64_t room(std::uint64_t swap_free) const {
    return (used < limit ? limit - used : 0) + std::min(swap, swap_free);
  }
};

// The memory cgroups with a limit that hold the process: its own first, then those around it. Of
// version 1 and version 2 (kernel: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
// From inside a container its own can be seen, not those around it. What can't be read is left out:
// empty for a process that has ended. `proc` is "/proc" but in tests.
std::vector<MemoryCgroup> memory_cgroups(Pid pid, const std::string& proc = "/proc");

}  // namespace stasis::proc
