// The processes that this one has started for its own work and has not collected yet, so that they
// are not taken for part of a job that this process is in. Thread-safe.
#pragma once

#include <set>

#include "base/ids.h"

namespace stasis {

void add_own_helper(Pid pid);
void remove_own_helper(Pid pid);
// After a fork the child has its parent's: its own are those of them whose parent it is.
std::set<Pid> own_helpers();

}  // namespace stasis
