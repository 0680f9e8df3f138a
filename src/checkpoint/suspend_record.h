// What a suspended process had on which GPU, remembered beside the journal, because the driver no
// longer tells it once the memory is free, and a restore that runs out of GPU memory may cost the
// job (NVIDIA/cuda-checkpoint#44). Losing it loses a check, never a job: of one that was restored
// to be suspended the image is still there. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/process_tree.h"
#include "proc/process_id.h"

namespace stasis {

struct SuspendedMemory {
  std::vector<GpuUse> uses;
  // All GPUs that the driver saw where the memory was, if that was another machine than this one:
  // the old side of the GPU map that bringing it back needs.
  std::vector<Gpu> gpus;
  // The image that has the content of the memory that the direct path has moved; empty: the process
  // has it.
  std::string image = {};
  // The first process of the tree that it was suspended with, if that had others with CUDA; pid 0
  // otherwise, and in records of earlier versions.
  ProcessId with = {};
  std::int64_t since = 0;  // seconds since 1970; set when it is remembered, 0 if unknown
};

// Remembers the tree's gpu_use() for each of its CUDA processes. Failures are ignored.
void remember_suspended(const ProcessTree& tree);
// kIo, kNoSpace.
Result<void> remember_suspended(const Process& process, const SuspendedMemory& memory);
// Nothing if this very process (number and start time) was not suspended by us.
std::optional<SuspendedMemory> recall_suspended(const Process& process);
// The same of a process in another PID namespace: by its number there and the mark of that one
// (pid_namespace_mark()), and by the state directory there, as it is seen from here.
std::optional<SuspendedMemory> recall_suspended_in(const std::string& directory,
                                                   const ProcessId& process,
                                                   const std::string& mark);
void forget_suspended(const Process& process);
// Removes what processes have left that ended while they were suspended.
void forget_the_dead();

}  // namespace stasis
