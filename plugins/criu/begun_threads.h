// SPDX-License-Identifier: GPL-2.0-or-later
// What criu's restore needs of the threads that the driver's libraries leave in its process.
#pragma once

#include "base/result.h"

namespace stasis::plugin {

// Comes back when each thread of this process has begun to run.
//
// criu makes its first task with clone(2) itself, and that task has a copy of the C library's list
// of threads. It changes its user in a user namespace (setresuid, setgroups), for which glibc goes
// through the list, and waits for each thread that has not begun. In the copy it never will.
Result<void> wait_for_begun_threads();

}  // namespace stasis::plugin
