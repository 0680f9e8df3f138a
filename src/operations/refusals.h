// What an operation refuses before it touches anything. Private to src/operations.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "operations/open.h"

namespace stasis {

// Refuses what the driver would refuse or lose (kNotSupported, each process with reason and
// remedy), before anything is touched, and also what the tree meets later. With `ignore` it is
// told and no more.
Result<void> refuse_obstacles(const Environment& env, OpenedTree& opened, bool ignore);

// Refuses processes of a part of a job of several nodes that have RDMA devices open: an adapter
// goes on with memory that no other part may touch. kNotSupported; with `ignore` it is told.
Result<void> refuse_rdma(const Environment& env, const ProcessTree& tree, bool ignore);

// kBusy of a member with CUDA whose threads could not be stopped, as of one that waits in vfork(2):
// the others would stand still while the tool waits for it.
Result<void> refuse_unstoppable(const ProcessTree& tree);

// Checks the members that are not in `checked` yet, and enters them there. The same refusals, of
// the driver's.
// `quiesced`: what the agents give up before has to be gone now.
Result<void> refuse_driver_obstacles(const Environment& env, const std::vector<TreeMember>& members,
                                     bool ignore, std::set<Pid>& checked, bool quiesced = false);

// kBusy if the content of a process's GPU memory is in an image and nowhere else, which is not
// `known`, nor, if those are `remembered`, in one that stands in the process's record; `remedy` is
// what brings it back.
Result<void> check_content(const ProcessTree& tree, const std::string& remedy,
                           const ImageContent* known = nullptr, bool remembered = false);

}  // namespace stasis
