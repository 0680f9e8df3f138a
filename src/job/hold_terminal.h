// The process of a job that holds its terminal (terminal.h): takes a pty, starts the command on it,
// copies, passes signals on, and ends as the command does. It is in the job's images, so it has
// nothing open but what CRIU saves.
#pragma once

#include "job/run.h"
#include "job/terminal.h"

namespace stasis::job {

// The whole of this process's work, until the command has ended; may end the process by the
// command's signal.
Outcome hold_terminal(HolderOrder order);

}  // namespace stasis::job
