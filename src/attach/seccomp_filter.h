// Whether the filters of a thread's system calls (seccomp) let pass what threads of ours make,
// which inherit them. A container has such a filter as a rule, so it must not be in the way by its
// mere existence; one that ends the program for a call of ours must be.
//
// Plain functions; the thread is stopped by the calling one.
#pragma once

#include "base/ids.h"
#include "base/result.h"

namespace stasis::attach {

// Which calls are made: of threads of ours, or of a library of ours as well.
enum class CallsInside { kOfThreads, kOfLibrary };

// kNotSupported: a filter would end the program, ask another one, or refuse what cannot be done
// without; or it may not be read (CAP_SYS_ADMIN).
Result<void> check_filters(Pid pid, Tid stopped, CallsInside calls);

}  // namespace stasis::attach
