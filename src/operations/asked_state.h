// State of a process that only the process itself can tell and set, by remote system calls of its
// first thread, and that CRIU loses without a word: the right to processor state that is off by
// default (AMX), the refusal of new code (PR_SET_MDWE), how new memory is given.
// docs/adr/0038-kernel-state.md.
//
// Private to src/operations. One thread at a time.
#pragma once

#include <cstdint>
#include <istream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "image/manifest.h"
#include "operations/asked_threads.h"

namespace stasis {

struct AskedState {
  bool answered = true;
  OwnStateRecord state;
  bool in_domain = false;         // it has threads in a Landlock domain
  bool has_supervisor = false;    // it has threads whose system calls a supervisor answers
  std::vector<Tid> with_tiles;    // threads in the middle of a computation with AMX
  std::vector<std::string> lost;  // seen, and not to be put right; for people
};
// By process; those that were there when all were asked.
using AskedStates = std::map<Pid, AskedState>;

// Asks every process of the tree below `root`. Those with CUDA are parked; the first thread of each
// other one is stopped for it, and goes on as it was. `threads`: what they were asked before.
AskedStates ask_processes(Pid root, ThreadAnswers threads);

// May the kernel have given a process with so many threads, on so many processors, a futex table of
// that size by itself? Linux tells no other difference.
bool may_be_kernels_choice(std::uint64_t slots, std::size_t threads, std::size_t processors);

// Of a text of /proc/PID/smaps: the bytes that are locked and not there, as mlock2(MLOCK_ONFAULT)
// leaves them until they are used; of the first million lines. CRIU locks them with all of their
// pages. All that is locked goes to `locked`, ranges that touch as one.
std::uint64_t locked_and_not_there(std::istream& smaps, std::vector<LockedRecord>& locked);

// kUndumpable if any is in a Landlock domain, which a restore would take from it: no call
// tells its rules; or has a supervisor of its system calls, which a restore would take as well.
Result<void> refuse_sandboxes(const AskedStates& answers);

// CRIU takes the tiles from a thread that is in the middle of a computation with AMX, and does not
// save them. kBusy: a moment later none may be.
Result<void> refuse_tiles(const AskedStates& answers);

// Puts the answers into the manifest's processes. One that was started since has what it inherits
// from its parent. The lost: a sentence each, also of those that did not answer.
std::vector<std::string> note_answers(const AskedStates& answers,
                                      std::vector<ProcessRecord>& processes);

// Sets it in the restored processes. For the moment at which CRIU has made them, and none of their
// threads runs code of its own. A process that CRIU traces then (the root of the tree) is left out
// and returned, to be set as soon as CRIU lets go of it. An error: a program would be
// ended by its next AMX instruction, or would run without a protection that it has set for itself;
// what else cannot be set is told to `lost`.
Result<std::vector<Pid>> set_asked_state(const std::vector<ProcessRecord>& processes,
                                         std::vector<std::string>& lost);
// The same for those that were left out.
Result<void> set_asked_state_of(const std::vector<Pid>& wanted,
                                const std::vector<ProcessRecord>& processes,
                                std::vector<std::string>& lost);

}  // namespace stasis
