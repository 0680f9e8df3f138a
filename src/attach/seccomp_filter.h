// Whether the filters of a thread's system calls (seccomp) let pass what threads of ours make,
// which inherit them. A container has such a filter as a rule, so it must not be in the way by its
// mere existence; one that ends the program for a call of ours must be.
//
// Plain functions; the thread is stopped by the calling one.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>

#include <cstdint>
#include <optional>
#include <span>

#include "base/ids.h"
#include "base/result.h"

namespace stasis::attach {

// What a filter answers to a call, as the kernel would run it (SECCOMP_RET_...). Nothing if it is
// no program of that kind, or asks where in the code the call is made, which is not known
// beforehand.
std::optional<std::uint32_t> run_filter(std::span<const sock_filter> program,
                                        const seccomp_data& call);

// Which calls are made: of threads of ours, or of a library of ours as well.
enum class CallsInside { kOfThreads, kOfLibrary };

// kNotSupported: a filter would end the program, ask another one, or refuse what cannot be done
// without; or it may not be read (CAP_SYS_ADMIN).
Result<void> check_filters(Pid pid, Tid stopped, CallsInside calls);

}  // namespace stasis::attach
