// The driver's device files in processes that have them only because they were forked from one that
// uses CUDA: the workers of a data loader, as PyTorch starts them.
//
// A child cannot use CUDA (every call returns 3, driver 580), but it keeps the open files and their
// mappings, and CRIU can dump neither. They are replaced, each file by one that no process writes
// to, each mapping by empty memory, under the same numbers and addresses. It is not undone when a
// dump fails. What a child loses by it is an NVML that its parent had begun to use before the fork.
//
// A file counts as inherited if it is the very one (kcmp) that a process with CUDA has open. Others
// are a process's own (it watches the GPU by NVML), and CRIU would refuse them. A process that
// shares its memory or its descriptors with one that uses CUDA is never touched. docs/adr/0012.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/journal.h"
#include "checkpoint/process_tree.h"
#include "proc/procfs.h"

namespace stasis {

struct InheritedFiles {
  proc::ProcessInfo process;
  std::vector<int> descriptors;
  std::vector<proc::Mapping> mappings;
  bool simulated = false;
};

// Is it a device file of the driver's, or what stands for one on the simulated driver?
bool is_drivers_file(std::string_view path, bool simulated);

// Of the members without CUDA. To be asked while the others have their files: before any of them is
// checkpointed. kNotSupported, naming it, if a process has such files and has not inherited them
// from one that has them now; with `ignore` it is left out. Processes that have gone have none, and
// so have those that cannot be examined.
Result<std::vector<InheritedFiles>> find_inherited_files(const proc::ProcFs& procfs,
                                                         const std::vector<TreeMember>& members,
                                                         bool simulated, bool ignore);

// Replaces them, all threads of each process being stopped meanwhile; which processes they are is
// in the journal before, if there is one. Survives our death as park_threads() does, with
// finish_remote_call(). All are tried; the first error. None for a process that has gone, or has
// let go of them. kBusy (another tracer), kNotPermitted, kNotSupported.
Result<void> replace_inherited_files(std::span<const InheritedFiles> found, Journal* journal);

}  // namespace stasis
