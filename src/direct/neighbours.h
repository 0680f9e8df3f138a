// Programs of other trees on the GPUs of an operation. It makes and ends contexts there, for which
// the driver switches the GPU; away from a kernel of a program that it has restored before it
// cannot, and after some 4 s that program is lost
// (docs/adr/0031-contexts-beside-restored-programs.md).
#pragma once

#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/journal.h"
#include "direct/environment.h"
#include "driver/gpu_plan.h"
#include "proc/procfs.h"

namespace stasis {

// Programs of other trees that were restored before, as their agents' pages say.
struct RestoredNeighbours {
  std::vector<proc::ProcessInfo> known;    // of users whose word is waited for (KnownUsers)
  std::vector<proc::ProcessInfo> foreign;  // of others, who may have forged it
  // Of such others, too: there was no time to find out (ForeignTime).
  std::vector<proc::ProcessInfo> unasked;

  bool empty() const { return known.empty() && foreign.empty() && unasked.empty(); }
};

// Those that run on `gpus` or on the GPUs that `ours` use. Programs without an agent are not known.
RestoredNeighbours restored_neighbours(const Environment& env,
                                       const std::vector<proc::ProcessInfo>& ours,
                                       const std::set<GpuUuid>& gpus);
// Tells which of them are not held meanwhile, and what to do.
void tell_of_restored(const Environment& env, const std::vector<proc::ProcessInfo>& who);
// The same of the unasked.
void tell_of_unasked(const Environment& env, const std::vector<proc::ProcessInfo>& who);
// "17 (python3), 18 (python3)"
std::string named(const std::vector<proc::ProcessInfo>& who);

// Before `ours` come back, also to `gpus`: tells of all others that run there, since the GPU cannot
// be switched away from `ours` from then on.
void tell_of_neighbours_to_come(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                                std::set<GpuUuid> gpus);
// kBusy where `ours` are ranks of NCCL, known by their sockets, and ranks of another job that were
// restored before run there: both jobs are lost then (two H200s, driver 580.159.04, in the sixth of
// some cycles).
Result<void> refuse_beside_ranks(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                                 std::set<GpuUuid> gpus);

// The same of what an operation that was cut short has left, which stays as it is then, and its
// record with it.
Result<void> refuse_recovery_beside_ranks(const Environment& env, const JournalRecord& record);

}  // namespace stasis
