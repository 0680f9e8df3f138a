// The beginning of a trace, which the kernel may hold up without an end: while a thread of the
// process executes a program whose file does not come (FUSE, NFS), PTRACE_SEIZE waits, and goes on
// waiting after every handler of a signal.
#pragma once

#include <functional>

#include "base/ids.h"
#include "base/result.h"

namespace stasis {

// Calls `act` on a thread of its own, because ptrace is bound to a thread. kBusy if a seize() there
// has taken five seconds: then what `act` has made on its stack is destroyed, and the kernel has
// let go what it had seized.
Result<void> trace_on_own_thread(const std::function<Result<void>()>& act);

namespace proc {

// ptrace(PTRACE_SEIZE) with these options; errno. Has an end on a thread of trace_on_own_thread()
// alone, and that thread ends with it.
long seize(Tid thread, long options);

}  // namespace proc
}  // namespace stasis
