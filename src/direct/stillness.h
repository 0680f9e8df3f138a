// Keeps the threads of programs still for the moment in which an agent replaces memory that they
// reach without a call of the driver: managed memory, which the processor reads and writes too.
//
// The gate does not hold those threads back. Parked (proc/parking.h) they stay so if this process
// dies; `stasis recover` lets them go on.
#pragma once

#include <map>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "checkpoint/process.h"
#include "direct/agent_set.h"
#include "direct/environment.h"

namespace stasis {

// Of each process with such memory, the thread by which the driver acts: parked, it would answer no
// question.
using DriverThreads = std::map<Pid, Tid>;

// Adds those of `processes` whose agent is in `agents`. Asks the driver, which must hold none of
// them.
Result<void> note_driver_threads(const AgentSet& agents,
                                 const std::vector<const Process*>& processes,
                                 DriverThreads& threads);

// Where a tool was killed, or gave up, while an agent replaced memory under parked threads: waits
// for the agent, so that the threads can be let go on. Nothing to do otherwise.
Result<void> finish_stillness(const Environment& env, const Process& process);

class Stillness {
 public:
  Stillness() = default;
  Stillness(const Stillness&) = delete;
  Stillness& operator=(const Stillness&) = delete;
  ~Stillness() { (void)end(); }

  // Parks all threads of the agent's process but its own and the driver's, if it has such memory.
  // Not where the first thread of this process, as CRIU's, has them all by ptrace. The errors of
  // park_threads(); kInternal if the driver's thread was not noted.
  Result<void> keep(const direct::AgentClient& agent, const DriverThreads& threads);
  // Waits for the agent's answer to the command that replaces the memory. If there is none, it may
  // still be at it: its process's threads stay parked then, until finish_stillness().
  Result<void> finish(direct::AgentClient& agent);
  // Sends them on; those of a process that has gone are no failure.
  Result<void> end();

 private:
  std::vector<Pid> kept_;
};

}  // namespace stasis
