// Looks after the processes of a tree that stand still for a dump: they do not end by themselves,
// and the program is not to be held up by others meanwhile. Where one was killed CRIU fails at once
// or waits for ever.
//
// Private to src/operations. One thread at a time.
#pragma once

#include <optional>
#include <vector>

#include "base/units.h"
#include "checkpoint/process_tree.h"
#include "direct/environment.h"
#include "proc/held_files.h"

namespace stasis {

class DumpWatch {
 public:
  // To be made before the caller has files of an image open (held_files.h). The reference outlives
  // it.
  explicit DumpWatch(const Environment& env) : env_(env) {}

  // The tree stands still. kUndumpable (refuse_held()).
  Result<void> refuse_held_up(const ProcessTree& tree);
  // From time to time while CRIU works; asks for files every five seconds. kProcessGone, when one
  // has ended two seconds ago; kUndumpable.
  Result<void> check(const ProcessTree& tree);

 private:
  const Environment& env_;
  proc::HeldFiles files_;
  Clock::time_point asked_;
  std::optional<Clock::time_point> dead_since_;
};

}  // namespace stasis
