// The beginning of a trace, which the kernel may hold up without an end: while a thread of the
// process executes a program whose file does not come (FUSE, NFS), PTRACE_SEIZE waits, and goes on
// waiting after every handler of a signal.
#pragma once

#include <functional>

#include "base/ids.h"
#include "base/result.h"

namespace stasis {

// Calls `act` on a thread of its own: what it holds by ptrace is let go at its end, whatever
// happened.
Result<void> trace_on_own_thread(const std::function<Result<void>()>& act);

namespace proc {

// ptrace(PTRACE_SEIZE) with these options; errno. EINTR after five seconds on a thread of
// trace_on_own_thread(), for which SIGRTMAX - 2 gets a handler if it has none; on others it waits.
long seize(Tid thread, long options);

}  // namespace proc
}  // namespace stasis
