// What CRIU would refuse to dump, as far as it can be seen from outside, before anything is
// touched. CRIU itself says so only when the GPU's memory has been moved already.
// Also what CRIU dumps and loses at the restore, of which it says nothing. Tried with CRIU 4.2.1
// (tests/integration/doctor*.bats, docs/adr/0013-doctor.md). Not seen: what
// CRIU cannot do on one file system or another. Reads /proc, and opens what is watched by inotify
// without reading it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/obstacle.h"
#include "checkpoint/process_tree.h"
#include "image/criu_options.h"
#include "proc/held_files.h"
#include "proc/procfs.h"

namespace stasis {

// Of the tree `members`: red what a dump with `options` fails on, yellow what it may. The driver's
// own files, which it closes at the checkpoint, do not count; `simulated`: those of the simulated
// one. `connected`: the pipes that a restore connects again, "pipe:[1234]". What cannot be read is
// left out.
std::vector<Obstacle> find_undumpable(const proc::ProcFs& procfs,
                                      const std::vector<TreeMember>& members,
                                      const CriuOptions& options, bool simulated,
                                      std::span<const std::string> connected,
                                      const Interrupt& interrupt);

// Whether a program that is at work comes by itself to what ends it, in its next moment.
bool passes_by_itself(const Obstacle& one);

// Of these only what `files` finds, for a tree that stands still: one or none.
std::vector<Obstacle> find_held_files(const proc::ProcFs& procfs,
                                      const std::vector<proc::ProcessInfo>& processes,
                                      proc::HeldFiles& files, const Interrupt& interrupt);

}  // namespace stasis
