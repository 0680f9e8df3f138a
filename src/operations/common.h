// What the operations share; not for use outside this folder.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/group.h"
#include "checkpoint/journal.h"
#include "operations/operations.h"

namespace stasis::operations {

// Measures phases one after the other.
class Phases {
 public:
  // Ends the phase before, if any, and begins the next.
  void begin(std::string name) {
    end();
    name_ = std::move(name);
    start_ = Clock::now();
  }
  void end() {
    if (name_.empty()) return;
    done_.push_back({std::exchange(name_, {}), since(start_).count()});
  }
  std::vector<PhaseRecord> take() {
    end();
    return std::move(done_);
  }
  const std::vector<PhaseRecord>& done() const { return done_; }
  Seconds total() const { return since(first_); }

 private:
  Clock::time_point first_ = Clock::now();
  Clock::time_point start_;
  std::string name_;
  std::vector<PhaseRecord> done_;
};

// The journal's targets of a group: its CUDA processes with the state to bring them back to.
std::vector<JournalTarget> journal_targets(const std::vector<GroupMember>& members);

// Opens the tree below `root` and enters it into the journal, which the group keeps up to date as
// it grows. kNotCuda if no process of the tree uses CUDA.
struct OpenedGroup {
  std::unique_ptr<Journal> journal;
  Group group;
};
Result<OpenedGroup> open_group(const Environment& env, const std::string& operation, Pid root,
                               const std::string& image);

// Rolls the group back after `why`, and closes the journal if that worked. Returns the error to
// report: `why`, or kNotRolledBack with both.
Error roll_back(OpenedGroup& opened, Error why);

// What the processes are now, asked anew.
std::vector<ProcessReport> report_processes(const Group& group);

// Verifies by asking that each CUDA process is in its wanted state.
Result<void> verify_states(const Group& group, CudaState wanted);

// The complete map for the driver, empty if everything stays where it was. `from` are the GPUs the
// processes were on.
Result<std::vector<GpuPair>> plan_gpu_map(Driver& driver, std::span<const GpuMapEntry> entries,
                                          std::span<const Gpu> from, std::span<const Gpu> to);

// kOutOfGpuMemory, with the figures, if what was used on the old GPUs does not fit into the free
// memory of the new ones.
Result<void> check_gpu_memory(std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                              std::span<const Gpu> gpus);

}  // namespace stasis::operations
