// Programs of other trees that the driver has restored before, kept behind the gates of their
// agents while a context is made on their GPU: the driver cannot switch the GPU away from a kernel
// of theirs, and would end it (docs/adr/0031-contexts-beside-restored-programs.md).
//
// The gates open when this ends, and by themselves if the tool is killed. Moves. One thread at a
// time.
#pragma once

#include <chrono>
#include <set>
#include <utility>
#include <vector>

#include "direct/agent_client.h"
#include "direct/environment.h"
#include "direct/neighbours.h"
#include "driver/gpu_plan.h"
#include "proc/procfs.h"

namespace stasis {

// How long a verb waits for them that has no time limit of its own.
inline constexpr std::chrono::milliseconds kNeighbourTime{20000};

class HeldNeighbours {
 public:
  // None is held.
  HeldNeighbours() = default;
  HeldNeighbours(HeldNeighbours&&) = default;
  HeldNeighbours& operator=(HeldNeighbours&& other) noexcept {
    std::swap(agents_, other.agents_);
    std::swap(foreign_, other.foreign_);
    return *this;
  }
  HeldNeighbours(const HeldNeighbours&) = delete;
  HeldNeighbours& operator=(const HeldNeighbours&) = delete;
  ~HeldNeighbours() { release(); }

  // Those that restored_neighbours() names: waits for their GPU work, `longest` at most, and for
  // that of foreign users ForeignTime. Tells of those that cannot be held. kBusy: the work of one
  // of a known user does not end, and none is held. kInterrupted.
  static Result<HeldNeighbours> hold(const Environment& env,
                                     const std::vector<proc::ProcessInfo>& ours,
                                     const std::set<GpuUuid>& gpus,
                                     std::chrono::milliseconds longest);
  // The same for those, by one who knows them.
  static Result<HeldNeighbours> hold(const Environment& env, const RestoredNeighbours& restored,
                                     std::chrono::milliseconds longest);
  // The same where the context is made in any case: of one that does not end its work it tells. No
  // GPUs: it may be any, as it was not written down which.
  static HeldNeighbours hold_if_possible(const Environment& env,
                                         const std::vector<proc::ProcessInfo>& ours,
                                         std::set<GpuUuid> gpus, std::chrono::milliseconds longest);
  bool empty() const { return agents_.empty() && foreign_.empty(); }
  // The contexts are made.
  void release();

 private:
  std::vector<direct::AgentClient> agents_;
  std::vector<direct::AgentClient> foreign_;
};

}  // namespace stasis
