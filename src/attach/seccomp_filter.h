// Whether the filters of a thread's system calls (seccomp) let pass what threads of ours make,
// which inherit them. A container has such a filter as a rule, so it must not be in the way by its
// mere existence; one that ends the program for a call of ours must be.
//
// Plain functions; a thread that is `stopped` is so by the calling one.
#pragma once

#include "base/ids.h"
#include "base/result.h"
#include "proc/address_space.h"

namespace stasis::attach {

// Which calls are made: of threads of ours, or of a library of ours as well.
enum class CallsInside { kOfThreads, kOfLibrary };

// kNotSupported: a filter would end the program, ask another one, or refuse what cannot be done
// without; or it may not be read (CAP_SYS_ADMIN).
Result<void> check_filters(Pid pid, Tid stopped, CallsInside calls);

// The same of each thread that has a filter, for hooks that any of them may come by; stops one
// after the other. kBusy, too, if one cannot be stopped.
Result<void> check_filters_of_all(const proc::AddressSpace& space, CallsInside calls);

}  // namespace stasis::attach
