// Files without a name, as memory of memfd_create(2) and deleted ones: who else has them.
//
// Stateless; thread-safe.
#pragma once

#include <sys/types.h>

#include <optional>
#include <set>
#include <span>

#include "proc/procfs.h"

namespace stasis::proc {

struct NamelessFile {
  dev_t device = 0;
  ino_t number = 0;
  bool is_written = false;  // by whom is asked about
};

// A process that is not one of `tree`, and no helper of this one's, and has one of these open or
// mapped shared, so that one of the two sees what the other writes. Looks for two seconds at most.
std::optional<ProcessInfo> holder_outside(std::span<const NamelessFile> files,
                                          const std::set<Pid>& tree);

}  // namespace stasis::proc
