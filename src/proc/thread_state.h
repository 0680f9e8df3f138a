// What the kernel keeps for a thread, read and set from outside of it.
//
// Stateless; thread-safe. A caller that sets holds the process, or knows that it stands still: the
// numbers are looked up anew by each call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

// The processors a thread may run on, as "0-3,7". kNoSuchProcess, kNotPermitted, kIo.
Result<std::string> affinity(Tid thread);
// kUsage if `cpus` is no such list. kIo if the kernel refuses: none of them is here.
Result<void> set_affinity(Tid thread, std::string_view cpus);
// The processors of the cpuset that holds the process; nothing if it is in none.
std::optional<std::string> cpuset_of(Pid pid);

// As ioprio_get(2) has it; 0: none of its own.
Result<std::uint32_t> io_priority(Tid thread);
Result<void> set_io_priority(Tid thread, std::uint32_t priority);

// By how much its timers may be late, in nanoseconds. Nothing where it has none (real-time).
std::optional<std::uint64_t> timer_slack(Tid thread);
Result<void> set_timer_slack(Tid thread, std::uint64_t nanoseconds);

inline constexpr std::uint32_t kMostLoad = 1024;  // SCHED_CAPACITY_SCALE

// How the kernel schedules it, as sched_getattr(2) has it.
struct Scheduling {
  std::uint32_t policy = 0;  // SCHED_*, without SCHED_RESET_ON_FORK
  // Nanoseconds that it runs at a time, of one that is not real-time: the machine's own figure
  // where the program has set none. 0 before Linux 6.12.
  std::uint64_t slice = 0;
  // Between which loads of 1024 the kernel takes it to be, where the program has chosen that
  // (utilisation clamps); else 0 and kMostLoad.
  std::uint32_t least_load = 0;
  std::uint32_t most_load = kMostLoad;
};
std::optional<Scheduling> scheduling(Tid thread);
// kIo if the kernel refuses.
Result<void> set_slice(Tid thread, std::uint64_t nanoseconds);
// kIo also of a kernel without utilisation clamps.
Result<void> set_load(Tid thread, std::uint32_t least, std::uint32_t most);

// Of the session of the process, to which sched(7) gives processor time as a whole; 0 where there
// is none.
int autogroup_nice(Pid pid);
Result<void> set_autogroup_nice(Pid pid, int nice);

// personality(2).
std::optional<std::uint32_t> personality(Pid pid, Tid thread);

// PR_MCE_KILL: "early", "late", or empty for the machine's own.
std::string machine_check(Pid pid, Tid thread);

// The number by which the kernel's audit knows the login that the process comes from; nothing where
// it comes from none.
std::optional<std::uint32_t> audit_session(Pid pid);

// What parts of memory a core dump has.
std::optional<std::uint32_t> core_dump_filter(Pid pid);
Result<void> set_core_dump_filter(Pid pid, std::uint32_t filter);

// The NUMA policy of a thread as numa_maps(5) has it ("default", "bind:0-1"); nothing where the
// kernel knows none. It is read of the process's first mapping, which has no policy of its own
// unless the program has given it one: its own code as a rule.
std::optional<std::string> memory_policy(Pid pid, Tid thread);

// What set_mempolicy(2) takes for it. Nothing if it is none that is known.
struct MemoryPolicy {
  int mode = 0;                      // with its flags
  std::vector<std::uint64_t> nodes;  // a bit for each; empty if the mode has none
};
std::optional<MemoryPolicy> parse_memory_policy(std::string_view text);

// "0-3,7" as bits, at most `most` of them; nothing if it is no list.
std::optional<std::vector<std::uint64_t>> parse_list(std::string_view text, std::size_t most);

}  // namespace stasis::proc
