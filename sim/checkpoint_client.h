// The caller's side of the checkpoint functions: finding a target and asking its restore thread.
//
// No driver is needed in the caller. A pid is one of the caller's PID namespace; a thread's id is
// taken for its process, as the real driver does. Threads: everything may be called from any
// thread.
#pragma once

#include "sim/control.h"

namespace stasis::sim {

cuda::CUresult target_state(int pid, cuda::CUprocessState& out);
cuda::CUresult target_restore_thread(int pid, int& out);
// Fills in what the caller knows (version, faults) and waits for the answer.
cuda::CUresult ask_target(int pid, Request& request);

}  // namespace stasis::sim
