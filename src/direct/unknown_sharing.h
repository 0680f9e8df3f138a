// Whether processes without an agent may have GPU memory of each other, which the driver saves and
// cannot restore: the job would be lost at its resume, and from outside it cannot be seen. The
// driver inside them is asked (attach/gpu_survey.h), in a tree in which at least two processes use
// CUDA; and in one that is alone in its tree if another on the machine uses CUDA: the user may have
// named one of several by itself, which is likely if the two have host memory together.
#pragma once

#include <vector>

#include "base/obstacle.h"
#include "checkpoint/process_tree.h"

namespace stasis {

// One for each process of which that cannot be ruled out, and for each that has managed memory
// which cannot be seen from outside. `members` run. Where a process cannot be asked it is red only
// if the process shares host memory with another of them, which may be how they share that of the
// GPU; otherwise yellow. What one that is alone may share with one that has no host memory together
// with it is yellow, too.
// One with an agent of another version is red.
// `asked_only`: nothing of those that cannot be asked.
std::vector<Obstacle> find_unknown_sharing(const std::vector<TreeMember>& members, bool simulated,
                                           bool asked_only = false);

}  // namespace stasis
