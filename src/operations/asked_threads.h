// What threads have that their process has not, and that CRIU loses without a word: what the kernel
// shows of each, and what one tells by a system call that it makes for us.
//
// Private to src/operations. One thread at a time. Asked while the program still runs: each
// question stops some threads for a moment, and there may be thousands.
#pragma once

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "proc/address_space.h"

namespace stasis {

struct AskedThreads {
  std::set<Tid> asked;  // not the first one, which is asked beside its process
  bool all_seen = true;
  std::vector<Tid> without_speculation;
  std::vector<Tid> flushing;
  std::vector<Tid> in_group;
  std::vector<Tid> with_keys;
  std::vector<Tid> without_time_stamp;
  std::vector<Tid> without_cpuid;
  std::vector<Tid> dispatching;
};
// By process.
using ThreadAnswers = std::map<Pid, AskedThreads>;

// Of all processes below `root`; takes a second at most, and then some are left out.
ThreadAnswers ask_threads(Pid root);

// When the program stands still: asks the few that were made since, adds what was seen of all to
// `lost`, and says how many were not asked.
void note_threads_asked(const proc::AddressSpace& space, AskedThreads& answers,
                        std::vector<std::string>& lost);

// Of /proc/PID/status: has a thread chosen to run without speculation (PR_SET_SPECULATION_CTRL)?
bool limits_speculation(std::string_view status);

// A filter of system calls may kill for those that are asked. Does the kernel let us lift it for
// them (ptrace(2), PTRACE_O_SUSPEND_SECCOMP)?
bool may_lift_filters();

}  // namespace stasis
