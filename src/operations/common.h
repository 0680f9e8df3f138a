// What the operations share; not for use outside this folder.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/phases.h"
#include "checkpoint/group.h"
#include "checkpoint/journal.h"
#include "direct/gpu_memory.h"
#include "driver/gpu_plan.h"
#include "operations/operations.h"

namespace stasis {

// Enters the tree below `root` into the journal and opens it; the group keeps the journal up to
// date as it grows. The states are asked for once nobody else can be at work on the tree; a process
// that a killed operation left behind counts as what it was before that one. kNotCuda if no process
// of the tree uses CUDA and it may not be `without_cuda`; kBusy, also if a killed operation has
// left the content of somebody's GPU memory in an image, and not in `content`.
struct OpenedGroup {
  std::vector<UniqueFd> locks;  // process_lock.h
  std::unique_ptr<Journal> journal;
  GpuMemory direct;  // before the group, which must be back first
  Group group;
};
Result<OpenedGroup> open_group(const Environment& env, const std::string& operation, Pid root,
                               const std::string& image, bool without_cuda = false,
                               const ImageContent* content = nullptr,
                               std::span<const GpuMapEntry> gpu_map = {});

// Refuses what the driver would refuse or lose (kNotSupported, each process with reason and
// remedy), before anything is touched, and also what the group meets later. With `ignore` it is
// told and no more.
Result<void> refuse_obstacles(const Environment& env, OpenedGroup& opened, bool ignore);

// A tool that is killed may leave a driver's call behind that goes on inside the target, while the
// state is still the one of before. Waits until the targets of a killed operation come to rest:
// half a second without a change of state, or any memory moved of one that is locked or
// checkpointed, at most a minute. kInterrupted.
Result<void> settle(const Environment& env, std::span<const JournalTarget> targets);

// An operation on one of its programs is done: the record of a killed swap of that one is void.
void decide_swaps(const Group& group);

// Enters the criu that has been started into the journal.
Result<void> note_criu(Journal& journal, Pid criu);

// CRIU outlives the tool that has started it until it misses that one's answer, and works on the
// tree meanwhile. Waits for its end; kBusy, naming it, if that does not come, or kInterrupted.
Result<void> wait_for_criu(const Environment& env, const JournalRecord& record);

// Moves the memory of those out that have the agent, then locks and checkpoints the whole tree,
// until no process of it is left that uses the GPU. What
// processes without CUDA have inherited of it is replaced; for a dump a failure of that is one,
// otherwise it is told. The phases are those of GpuMemory::move_out(),
// "lock" and "checkpoint".
Result<void> quiesce(const Environment& env, OpenedGroup& opened, const QuiesceOptions& options,
                     Phases& phases);

// kBusy if the content of somebody's GPU memory is in an image and nowhere else, which is not
// `known`; `remedy` is what brings it back.
Result<void> check_content(const Group& group, const std::string& remedy,
                           const ImageContent* known = nullptr);

// Rolls the group back after `why`, and closes the journal if that worked. Returns the error to
// report: `why`, saying that everything is as before, or kNotRolledBack with both.
Error roll_back(const Environment& env, OpenedGroup& opened, Error why);
// The same where the group has been rolled back, or not: `back`.
Error rolled_back(const Environment& env, OpenedGroup& opened, Error why, Result<void> back);

// For memory that could not be brought back to a program that the driver lets run: kNotRolledBack,
// for which the record has to stay. As it is where the agent goes on trying by itself, or where the
// program has gone.
Error stands_still(Error why, Pid root, bool tries_by_itself);

// What the processes are now, asked anew.
std::vector<ProcessReport> report_processes(const Group& group);

// What a process is now, asked anew.
ProcessReport report_process(const Process& process, bool cuda, std::uint64_t gpu_bytes);

// Verifies by asking that each CUDA process that still lives is in its wanted state.
Result<void> verify_states(const Group& group, CudaState wanted);

}  // namespace stasis
