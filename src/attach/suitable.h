// Whether a call can be made inside a process (inside_call.h), by what /proc says of it, before
// anything in it is touched.
#pragma once

#include <vector>

#include "attach/c_library.h"
#include "base/result.h"
#include "proc/address_space.h"
#include "proc/procfs.h"

namespace stasis::attach {

// kBusy: it is traced, stopped or frozen. kNotSupported: a strict seccomp thread, a shadow stack,
// other credentials than those of the user who started it, a sanitizer, a 32-bit program. kZombie,
// kProcessGone. The message says why the process is left alone.
Result<void> check_process(Pid pid, const proc::ProcessInfo& info);
// kBusy: it is stopped by a signal; kZombie.
Result<void> check_runs(const proc::ProcessInfo& info);
Result<void> check_runs(Pid pid);
Result<void> check_mappings(const std::vector<proc::Mapping>& mappings);

// The number of a thread in its innermost PID namespace; 0 if it has gone.
int inner_number(Pid pid, Tid thread);

}  // namespace stasis::attach
