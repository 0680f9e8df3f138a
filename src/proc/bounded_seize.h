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
// kBusy: what EINTR of seize() is about.
Error held_by_an_execve(Pid pid);
// kBusy if this process could not be stopped now, at which a tool would try for ten seconds and
// CRIU for twenty, with the rest of the job standing still: a trace of it cannot begin, or a thread
// of it is in a system call that nothing interrupts, for two seconds already (a file system that
// does not answer, vfork(2)).
Result<void> check_can_be_stopped(Pid pid);

}  // namespace proc
}  // namespace stasis
