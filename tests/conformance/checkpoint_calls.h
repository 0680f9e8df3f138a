// The checkpoint functions with what the cases give them.
#pragma once

#include <sys/types.h>

#include "api.h"

namespace stasis::conformance {

inline cuda::CUresult lock(pid_t pid, unsigned timeout_ms = 20'000) {
  cuda::CUcheckpointLockArgs args{};
  args.timeoutMs = timeout_ms;
  return api().cuCheckpointProcessLock(pid, &args);
}
inline cuda::CUresult checkpoint(pid_t pid) {
  return api().cuCheckpointProcessCheckpoint(pid, nullptr);
}
inline cuda::CUresult restore(pid_t pid) { return api().cuCheckpointProcessRestore(pid, nullptr); }
inline cuda::CUresult unlock(pid_t pid) { return api().cuCheckpointProcessUnlock(pid, nullptr); }

// The state, or 100 + the code if it cannot be had.
inline long state(pid_t pid) {
  cuda::CUprocessState out;
  const auto rc = api().cuCheckpointProcessGetState(pid, &out);
  return rc == cuda::CUDA_SUCCESS ? static_cast<long>(out) : 100 + static_cast<long>(rc);
}

}  // namespace stasis::conformance
