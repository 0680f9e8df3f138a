// The way out: the mover evicts the GPU memory of a group's processes that have the agent. Private
// to src/direct.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "base/phases.h"
#include "checkpoint/group_part.h"
#include "checkpoint/process_tree.h"
#include "direct/memory_state.h"

namespace stasis {

// When content is copied: beside the driver's checkpoint, from memory that the agents have pinned,
// or before the driver does anything. Into an image it is always the latter.
enum class CopyOrder { kBeside, kFirst };

// How a group is quiesced.
struct QuiesceOptions {
  std::chrono::milliseconds timeout{};  // for the gates, and for the driver's lock; zero: none
  bool ignore_obstacles = false;
  bool for_dump = false;
  MemoryPath path = MemoryPath::kAutomatic;
  const IntoImage* image = nullptr;  // otherwise into the processes' own memory
  bool comes_back = false;           // at once, so what there is room for may stay on the GPUs
  Retry again = Retry::kNone;        // what the error of the try before had; its reason is told
  std::function<void()> on_quiesced = {};  // as in SuspendOptions
  // Of a group of several nodes: nothing is copied or evicted before all its parts are quiesced.
  GroupPart* part = nullptr;
};

// Which processes, by which way and in which order: decided once, before any process is touched.
struct MoveOutPlan {
  enum class Way {
    kDriver,       // agents are left alone
    kAgents,       // and what cannot leave that way is left to the driver
    kNothingElse,  // what cannot leave that way is a failure
  };

  static MoveOutPlan make(const Environment& env, const ProcessTree& tree,
                          const QuiesceOptions& options);
  bool only_agents() const { return way == Way::kNothingElse; }

  Way way = Way::kAgents;
  std::vector<const Process*> running;
  std::vector<const Process*> locked;  // by another tool
  std::vector<const Process*> left;    // with the driver, by a tool that was killed
  CopyOrder order = CopyOrder::kBeside;
  // The driver has restored one of them before: a mover's contexts are made when they stand still.
  bool mover_when_quiesced = false;
  // One of another tree, on the same GPUs: it is held meanwhile (direct/held_neighbours.h).
  bool beside_restored = false;
};

// GpuMemory::move_out().
Result<void> move_out(MemoryState& state, const Environment& env, ProcessTree& tree,
                      const QuiesceOptions& options, Phases& phases);

}  // namespace stasis
