// Which other processes may belong to the job of a tree that is not quiesced: ranks wait for each
// other on the GPU, and one of them alone never gets ready while the others stand still or wait for
// it.
//
// Reads /proc only; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "proc/procfs.h"

namespace stasis {

struct OtherRanks {
  proc::ProcessInfo above;  // the nearest one that has them and the tree below it
  std::vector<Pid> others;  // that have the driver's library, at least one
};

// Looks at the processes above `root`, up to those that this one was started by: nothing where no
// other process with CUDA is below them.
std::optional<OtherRanks> find_other_ranks(const proc::ProcFs& procfs, Pid root);

// What its user can do, after "what to do: ".
std::string describe_other_ranks(const OtherRanks& ranks);

}  // namespace stasis
