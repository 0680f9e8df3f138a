// How the processes of a job that do one thing and end are told to stop.
#pragma once

#include "base/interrupt.h"

namespace stasis::job {

// From now on SIGTERM, which does not interrupt system calls, is a request to this one, which must
// live as long as the process; a later call names another. One thread at a time.
void stop_by_sigterm(Interrupt& interrupt);

}  // namespace stasis::job
