// The memory of a tree's processes that the driver cannot restore, and their agents can: what they
// share, memory of the host's from cuMemCreate, managed memory. It is given up and taken again
// where the driver moves all else: for the plugin for CRIU. The direct path does the same among its
// own steps.
//
// Nothing is written for a restore: the agents' own memory says what they miss
// (docs/adr/0046-shared-memory.md, 0048-managed-memory.md). One thread at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "checkpoint/process_tree.h"
#include "direct/agent_set.h"
#include "direct/stillness.h"

namespace stasis {

class UnrestorableMemory {
 public:
  // Where a process has such memory, closes the gates of all agents and has them give it up; the
  // programs stand still from then on. Otherwise touches nothing. The processes run and the driver
  // holds none of them. What cannot be taken again is refused, kNotSupported, with the programs as
  // they were, as after every error but kNotRolledBack.
  Result<void> give_up(const Environment& env, ProcessTree& tree,
                       std::chrono::milliseconds timeout);

  // Of a tree that was restored: those that gave something up before their dump.
  Result<void> find(const Environment& env, const ProcessTree& tree);

  // Nothing is missing anywhere, and the programs run on. The driver must hold none of the
  // processes, and at least the agents' threads must be able to run. After an error `stasis
  // recover` has to take it again.
  Result<void> take_back();
  // AgentSet::check_sharers_live().
  Result<void> check_sharers_live() const { return agents_.check_sharers_live(); }
  // An agent is being waited for that moves memory: left now, its program would stand still.
  // Thread-safe.
  bool is_moving() const { return moving_; }

 private:
  Result<bool> is_any();
  Result<void> refuse(const Environment& env, const ProcessTree& tree);

  AgentSet agents_;
  DriverThreads driver_threads_;
  std::atomic<bool> moving_ = false;
};

// The agents' threads of a process whose gate was closed: it has given up what it shares, or stands
// still for one that has. None otherwise.
std::vector<Tid> threads_that_take_back(Pid pid);

}  // namespace stasis
