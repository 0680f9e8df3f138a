// Turns what the driver answered about a process into an Error that says what is wrong and what to
// do, by looking at the process: the driver's OPERATING_SYSTEM (304), for one, stands for a missing
// process, a missing permission and a crashed one alike.
#pragma once

#include "checkpoint/process.h"

namespace stasis {

// Reads /proc; changes nothing. `pid` need not exist. The Error carries `failure` as it came.
Error explain_driver_failure(const DriverFailure& failure, Action action, Pid pid,
                             const proc::ProcFs& procfs);

}  // namespace stasis
