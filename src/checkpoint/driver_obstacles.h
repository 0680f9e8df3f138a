// What stands against a checkpoint and can be seen from outside, before anything is touched: memory
// that the driver would refuse to checkpoint, or checkpoints and can never restore.
//
// Reads /proc and NVML only. Not seen: memory that a program shares by CUDA IPC on its own account
// (its mappings and descriptors are those of any other, driver 580.159.04); NCCL without cuMem
// where that was chosen within the program; MIG where there is no NVML. Taken for ranks of one job:
// all that use NCCL in one network namespace.
//
// Here and not in doctor/, where what CRIU refuses is found: direct/sharing asks which of these the
// agents lift, and the plugin inside CRIU asks too, and both may include nothing above direct/.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/obstacle.h"
#include "driver/driver.h"
#include "proc/procfs.h"

namespace stasis {

// The obstacles of `processes`, which use CUDA. Those that have gone have none. kNotPermitted, kIo:
// could not look, which never counts as "none".
Result<std::vector<Obstacle>> find_obstacles(Driver& driver, const proc::ProcFs& procfs,
                                             std::span<const proc::ProcessInfo> processes);

// Which of these have RDMA devices (verbs of InfiniBand, RoCE, EFA) open or mapped. Whether there
// are connections over them, and what GPU memory an adapter may write to, cannot be seen in /proc.
Result<std::vector<Obstacle>> find_rdma(const proc::ProcFs& procfs,
                                        std::span<const proc::ProcessInfo> processes);

// Is it one of several ranks of NCCL on this host? Errors of ProcFs.
Result<bool> has_nccl_peers(const proc::ProcFs& procfs, Pid pid);

// Of managed memory, as far as it is mapped.
std::uint64_t managed_bytes(std::span<const proc::Mapping> mappings);

// All of them, at least one, for people: each reason once, with whom it concerns. kNotSupported.
Error describe_obstacles(std::span<const Obstacle> found,
                         std::span<const proc::ProcessInfo> processes);

}  // namespace stasis
