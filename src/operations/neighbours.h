// Programs of other trees on the GPUs of an operation. It makes and ends contexts there, for which
// the driver switches the GPU; away from a kernel of a program that it has restored before it
// cannot, and after some 4 s that program is lost
// (docs/adr/0031-contexts-beside-restored-programs.md). Private to src/operations.
#pragma once

#include <set>
#include <span>
#include <vector>

#include "direct/environment.h"
#include "driver/gpu_plan.h"
#include "proc/procfs.h"

namespace stasis {

// Tells which of them were restored before, as their agents' pages say, and what to do. Looked at
// are `gpus` and those that `ours` use now. Programs without an agent are not known.
void tell_of_neighbours(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                        std::set<GpuUuid> gpus = {});

// Where these come back.
std::set<GpuUuid> targets_of(std::span<const GpuUse> needed, std::span<const GpuPair> pairs);

}  // namespace stasis
