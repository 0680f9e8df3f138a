// The numbers that the kernel gives next to processes and threads of our PID namespace.
//
// CRIU makes the processes of an image with the numbers that they had, which have to be free until
// then, also of our own threads and helpers. The kernel counts up from the last number that it gave
// (/proc/sys/kernel/ns_last_pid), and from kLowestNumber on after the highest.
#pragma once

#include <optional>
#include <set>

#include "base/result.h"

namespace stasis::proc {

// RESERVED_PIDS in the kernel's kernel/pid.c: what is lower is given once in a namespace's life.
inline constexpr int kLowestNumber = 300;

// After which number to go on, so that the kernel gets to none of `kept` for as long as possible.
// None if `newest`, the last that it gave, is far enough before the next of them. `limit`: all
// numbers are lower (/proc/sys/kernel/pid_max).
std::optional<int> number_to_go_on_after(const std::set<int>& kept, int newest, int limit);

// From now on the kernel gives the numbers after this one. kNotPermitted without
// CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN where the PID namespace was made.
Result<void> go_on_after(int number);

// Leads the kernel away from these numbers, where it allows that. Where it does not, or where the
// machine uses up all others meanwhile, a number may be in use when CRIU needs it, which CRIU says.
void keep_free(const std::set<int>& kept);

}  // namespace stasis::proc
