// What killed operations have left, and what of it an operation waits for or makes void. Private to
// src/operations.
#pragma once

#include <span>

#include "checkpoint/journal.h"
#include "checkpoint/process_tree.h"
#include "direct/environment.h"

namespace stasis {

// A tool that is killed may leave a driver's call behind that goes on inside the target, while the
// state is still the one of before. Waits until the targets of a killed operation have settled:
// half a second without a change of state, or any memory moved of one that is locked or
// checkpointed, at most a minute. kInterrupted.
Result<void> settle(const Environment& env, std::span<const JournalTarget> targets);

// An operation on one of its programs is done: the record of a killed swap of that one is void.
void decide_swaps(const ProcessTree& tree);

// Removes the half of an image that a killed dump to `path` has left, with the names that CRIU has
// given to files for it; see clear_leftovers() for what stays.
// kNotPermitted if something stays that another user may have put there; the rest is removed.
Result<void> clear_half_image(const std::string& path, bool keep_complete);
// What CRIU has done to terminals of the tree for a killed dump is undone, as the half of an image
// tells it: before that is cleared.
void put_terminals_right(const Environment& env, const JournalRecord& record);
// As clear_half_image(), where it is told, and is no failure, that something stays, since others
// could keep an operation from its end, or that the folder of the image has gone.
Result<void> clear_or_tell(const Environment& env, const std::string& path, bool keep_complete);

// Enters the criu that has been started into the journal.
Result<void> note_criu(Journal& journal, Pid criu, bool takes_unread);

// CRIU outlives the tool that has started it until it misses that one's answer, and works on the
// tree meanwhile. Waits for its end; kBusy, naming it, if that does not come, or kInterrupted.
Result<void> wait_for_criu(const Environment& env, const JournalRecord& record);

}  // namespace stasis
