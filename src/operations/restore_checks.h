// What a restore looks at before it makes anything: whether this machine can take the image.
//
// Private to src/operations. Functions only; any thread.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "driver/gpu_plan.h"
#include "image/image_reader.h"
#include "operations/image_report.h"
#include "operations/kept_files.h"
#include "operations/operations.h"

namespace stasis {

// The state that a process of the image is brought back to.
CudaState wanted_state(const ProcessRecord& record);

// What it had on which GPU. Every uuid is one of the manifest's GPUs, which gpus_of() has judged.
std::vector<GpuUse> gpu_use_of(const ProcessRecord& record);

// The GPUs where the image was made. kImageCorrupt.
Result<std::vector<Gpu>> gpus_of(const Manifest& manifest);

// The program has the driver's library mapped, so the very same version must be here.
// kGpuMismatch, kDriverUnsupported.
Result<void> check_driver(const Driver& driver, const Manifest& manifest);

// This user may restore processes, with the capabilities that those of the image have. CRIU waits
// for ever where one is missing. kNotPermitted, naming it.
Result<void> check_rights(const ImageReader& image);

// The numbers of all processes and threads are free, and may be chosen here. Gives the dead a
// moment to be reaped. kPidInUse, kNotPermitted.
Result<void> check_numbers(const ImageReader& image);

// The files that the processes have open, mapped or as their directories are what they were.
// or can be made that. kCriuFailed with their paths; kNotPermitted (foreign_links.h);
// kImageCorrupt.
Result<void> check_files(const ImageReader& image);
// What is to be done for that before CRIU opens them, of what the image has the content of.
// kImageCorrupt.
Result<std::vector<std::pair<KeptFile, PutBack>>> files_to_put_back(const ImageReader& image);
// Those that a restore uses up: with any, the image can be restored only once.
std::vector<std::string> files_used_up(const ImageReader& image);
// Paths of files that were written to after the dump, and whose content is too large for the image.
std::vector<std::string> files_changed_for_good(const ImageReader& image);

// A job of `stasis run` has a /dev/shm of its own: only there can it be put back. kUsage.
Result<void> check_shared_memory(const ImageReader& image, const RestoreOptions& options);

// The memory of the processes, the GPU's content with it, has room on this host, swap included, and
// in our memory cgroup, if they will be in that one. `elsewhere`: bytes of the GPU's content that
// go to the GPU without becoming memory of theirs. `ours`: that we take for that, in our own
// cgroup. `filled`: of host memory that is not in CRIU's files (host_memory.h). kOutOfHostMemory
// with the figures.
Result<void> check_host_memory(const Manifest& manifest, std::uint64_t elsewhere,
                               bool in_our_cgroup, std::uint64_t ours = 0,
                               std::uint64_t filled = 0);
// The least that they have.
std::uint64_t least_memory(const Manifest& manifest, std::uint64_t elsewhere, std::uint64_t filled);

struct GpuPlan {
  std::vector<GpuPair> pairs;             // as the driver wants them
  std::map<GpuUuid, std::uint64_t> room;  // bytes that are left over
  std::vector<GpuUse> needed;             // on the GPUs of before
};
// Where the GPU memory of each process goes, and that it fits there.
Result<GpuPlan> plan_gpus(const Environment& env, const Manifest& manifest,
                          std::span<const Gpu> from, const RestoreOptions& options);

}  // namespace stasis
