// The way out of an operation that has failed, and what the processes are then. Private to
// src/operations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "operations/open.h"

namespace stasis {

// CurrentPhase during a roll-back, which is no measured phase.
inline constexpr const char* kRollBackPhase = "roll back";

// Restores the GPU state of a process, which a restore that was killed may have brought to another
// machine than the one it was on. kOutOfGpuMemory: it stays suspended.
Result<void> restore_state(const Environment& env, Process& process);

// ProcessTree::roll_back(). Where there is no room for what the driver would bring back it is not
// asked: kNotRolledBack, with the figures, and the processes stay as they are.
Result<void> roll_back_tree(const Environment& env, ProcessTree& tree);

// Rolls the tree back after `why`, and closes the journal if that worked. Returns the error to
// report: `why`, saying that everything is as before, but for what `stays` says, or kNotRolledBack
// with both.
Error roll_back(const Environment& env, OpenedTree& opened, Error why,
                const std::string& stays = {});
// The same where the tree has been rolled back, or not: `back`.
Error rolled_back(const Environment& env, OpenedTree& opened, Error why, Result<void> back,
                  const std::string& stays = {});

// For memory that could not be brought back to a program that the driver lets run: kNotRolledBack,
// for which the record has to stay. As it is where the agent goes on trying by itself, or where the
// program has gone.
Error stands_still(Error why, Pid root, bool tries_by_itself);

// Whether the agents take GPU memory again without a tool, as soon as there is room.
bool try_by_themselves(const std::vector<const Process*>& processes);

// What the processes are now, asked anew.
std::vector<ProcessReport> report_processes(const ProcessTree& tree);

// What a process is now, asked anew.
ProcessReport report_process(const Process& process, bool cuda, std::uint64_t gpu_bytes);

}  // namespace stasis
