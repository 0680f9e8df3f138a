#include "direct/sharing_refusals.h"

#include <utility>

#include <fmt/format.h>

#include "base/units.h"
#include "checkpoint/driver_obstacles.h"

namespace stasis {

std::string pieces(std::size_t count, std::uint64_t bytes) {
  return count == 1 ? fmt::format("1 piece ({})", format_bytes(bytes))
                    : fmt::format("{} pieces ({})", count, format_bytes(bytes));
}

Result<void> refuse_import(Pid pid, std::string what, std::string remedy) {
  return fail(refusal({"imported-memory", Severity::kRed, pid, std::move(what), std::move(remedy),
                       Override::kIgnoreObstacles}));
}

Result<void> refuse_foreign(Pid pid, const Orphans& orphans) {
  return refuse_import(
      pid,
      fmt::format("GPU memory of another process that no agent can import again (by a fabric "
                  "handle, from a memory pool, or of a process without an agent): process {} has "
                  "{}; the driver cannot restore it (the job would be lost)",
                  pid.value, pieces(orphans.count, orphans.bytes)),
      "start all of them with `stasis run`; fabric handles: NCCL_MNNVL_ENABLE=0, or descriptors "
      "in their place; memory pools: share memory of cudaMalloc or cuMemCreate");
}

Result<void> refuse_lost_owner(Pid pid, const Orphans& orphans) {
  return refuse_import(
      pid,
      fmt::format("GPU memory whose owner no agent finds (it has ended, or one of the two programs "
                  "has closed descriptors of its agent): process {} has imported {}; the driver "
                  "cannot restore it (the job would be lost)",
                  pid.value, pieces(orphans.count, orphans.bytes)),
      "have the program free it (cudaIpcCloseMemHandle; PyTorch: the last tensor of it), or start "
      "the job again so that it closes only descriptors that it knows");
}

Result<void> refuse_of_other_user(const ProcessShares& importer, const ProcessShares& owner) {
  return refuse_import(
      importer.pid,
      fmt::format("GPU memory of another user's process: process {} (user {}) has imported some of "
                  "process {} (user {}); agents give memory to processes of their own user only, "
                  "and the driver cannot restore it (the job would be lost)",
                  importer.pid.value, importer.uid, owner.pid.value, owner.uid),
      "run both as one user; a program that changes its user does so in both processes, or not "
      "while they share memory");
}

}  // namespace stasis
