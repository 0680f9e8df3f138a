// What a killed `stasis swap` has left.
#pragma once

#include <vector>

#include "cli/verbs.h"

namespace stasis::cli {

// Brings the two programs of each swap that was killed to what was asked for, where the first is
// suspended by now, or else to what they were before: one report for each. Called while the process
// has one thread.
std::vector<RecoverReport> recover_swaps(Context& context);

}  // namespace stasis::cli
