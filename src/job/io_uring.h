// Programs that get no io_uring.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"

namespace stasis::job {

// Whether a program finds io_uring.
enum class IoUring {
  kAutomatic,  // a job that is saved, and torchrun, find none where keeping it out costs nothing
  kAllowed,
  kKeptOut,
};

// From now on io_uring_setup(2) fails with ENOSYS in this thread and in all that it starts or
// becomes, as on a kernel without io_uring: libraries then do without, and CRIU, which cannot dump
// an io_uring, finds none. For good; what is restored keeps it. By a filter of system calls
// (seccomp(2)); a process without CAP_SYS_ADMIN also gives up gaining privileges by execve()
// (PR_SET_NO_NEW_PRIVS). Returns 0 or the errno. Async-signal-safe.
int do_without_io_uring();

// Whether this process, and so what it starts, may still gain privileges by execve() after that.
bool keeps_ways_to_privileges();

// Whether keeping it out of a job costs nothing: the kernel has filters, CRIU may read them
// (CAP_SYS_ADMIN in the first user namespace), and nothing gives up privileges.
bool can_do_without_io_uring_freely();

// Whether that is PyTorch's torchrun, by whatever name it is called, whose own store opens an
// io_uring in each process that waits for others (docs/adr/0034-programs-without-io-uring.md).
bool is_torchrun(const std::vector<std::string>& command);

// What to say of that errno: kNotSupported.
Error cannot_do_without_io_uring(int error_number);

}  // namespace stasis::job
