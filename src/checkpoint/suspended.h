// What a suspended process had on which GPU, remembered beside the journal, because nobody can ask
// for it once the memory is free, and a restore that runs out of GPU memory may cost the job
// (NVIDIA/cuda-checkpoint#44). Losing it loses a check, never a job. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checkpoint/group.h"

namespace stasis {

// Remembers the group's gpu_use() for each of its CUDA processes. Failures are ignored.
void remember_suspended(const Group& group);
// Nothing if this very process (number and start time) was not suspended by us.
std::optional<std::vector<GpuUse>> recall_suspended(const Process& process);
void forget_suspended(const Process& process);

}  // namespace stasis
