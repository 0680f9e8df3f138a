// A tree of processes, opened for an operation. Private to src/operations.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/journal.h"
#include "checkpoint/process_tree.h"
#include "direct/gpu_memory.h"
#include "operations/operations.h"

namespace stasis {

// Enters the tree below `root` into the journal and opens it; the tree keeps the journal up to
// date as it grows. The states are asked for once no other tool can be at work on the tree; a
// process that a killed operation left behind counts as what it was before that one. kNotCuda if no
// process of the tree uses CUDA and it may not be `without_cuda`; kBusy, also if a killed operation
// has left the content of a process's GPU memory in an image, and not in `content`.
struct OpenedTree {
  std::vector<UniqueFd> locks;  // process_lock.h
  std::unique_ptr<Journal> journal;
  GpuMemory direct;  // before the tree, which must be back first
  ProcessTree tree;
};
Result<OpenedTree> open_tree(const Environment& env, Operation operation, Pid root,
                             const std::string& image, bool without_cuda = false,
                             const ImageContent* content = nullptr,
                             std::span<const GpuMapEntry> gpu_map = {});

}  // namespace stasis
