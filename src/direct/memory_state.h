// The state that the parts of one operation on GPU memory share. Private to src/direct.
#pragma once

#include <optional>
#include <set>

#include "direct/agent_set.h"
#include "direct/content_sources.h"
#include "direct/held_neighbours.h"
#include "direct/mover_lease.h"
#include "direct/prefetch.h"
#include "direct/stillness.h"

namespace stasis {

// What becomes of processes whose memory does not come back.
enum class IfItFails {
  kTheyStandStill,  // until a tool tries it once more: going on is the way out
  kCallerEndsThem,  // so an interrupt ends it, too
};

struct MemoryState {
  AgentSet agents;   // whose memory is away, or stands still for that
  AgentSet lenders;  // whose programs run, and have made memory that is missing elsewhere
  ContentSources content;
  MoverLease mover;
  Prefetch prefetch{mover, content};
  DriverThreads driver_threads;
  std::set<Pid> known;  // members of which the user was told, or need not be
  // While the mover, or the driver for a process that comes back, works on their GPUs.
  std::optional<HeldNeighbours> neighbours;
  std::optional<Error> gone;  // of a process that had gone when it was to be brought back
};

// GpuMemory::hold_neighbours().
Result<void> hold_neighbours(MemoryState& state, const Environment& env,
                             const std::vector<proc::ProcessInfo>& ours,
                             const std::set<GpuUuid>& gpus, std::chrono::milliseconds longest);

}  // namespace stasis
