// What the /proc that is mounted here can be believed: whether its numbers are those of this
// process's own PID namespace, and whether it shows all processes of it.
//
// Asks the kernel; thread-safe.
#pragma once

#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

// kNotSupported, with what to do: none is mounted, or that of another PID namespace, in which each
// number means another process, or none.
Result<void> check_proc_mount();

// Whether it shows some users their own processes alone (hidepid), this one or another.
bool proc_may_hide();
// Whether it does so to this one. Where process 1 is the user's, this is not seen.
bool proc_hides_others();

// The kernel has that process, and /proc does not show it.
bool is_hidden(Pid pid);
Error hidden(Pid pid);

}  // namespace stasis::proc
