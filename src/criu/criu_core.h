// CRIU's files of the threads of an image: core-NUMBER.img, one protobuf message each, behind two
// magic numbers and its size. Of a message, the fields of images/core.proto and core-x86.proto of
// CRIU 4.0 to 4.2 that are named here; all others are passed over.
// The files are untrusted: what is read is bounded, and never taken to be whole. Stateless.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis {

// The signal that the thread gets when its parent ends; 0: none. Nothing if the file does not say.
std::optional<int> parent_death_signal(const UniqueFd& criu_dir, Tid thread);

// The capabilities that the thread has (its permitted set), as bits. Nothing if the file does not
// say.
std::optional<std::uint64_t> permitted_capabilities(const UniqueFd& criu_dir, Tid thread);

// Whether tiles of AMX hold something in the thread (XTILECFG or XTILEDATA in use), which CRIU
// 4.2.1 does not save. False if the file does not say.
bool has_tiles(const UniqueFd& criu_dir, Tid thread);
// The threads of a dumped process that stands still for which that is so.
std::vector<Tid> threads_with_tiles(const UniqueFd& criu_dir, Pid pid);

// The highest number that a restore makes processes and threads by (pstree.img): for a group and a
// session whose leader has ended CRIU makes one as well. 0 if the file does not say.
int highest_number(const UniqueFd& criu_dir);

// Lets the threads of a process that stands still, dumped, make the system calls again in which
// they were interrupted (docs/adr/0007), and which CRIU would let end with EINTR: those that wait
// for a time that only the kernel has, and those that return EINTR after any stop. Not of a thread
// that a signal waits for. Changes the files in their places. The number of threads it has done so
// for. kIo.
Result<int> restart_calls(const UniqueFd& criu_dir, Pid pid);

}  // namespace stasis
