// The way out: the mover evicts the GPU memory of a process tree's processes that have the agent.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/phases.h"
#include "checkpoint/process_tree.h"
#include "direct/memory_state.h"
#include "group/group_part.h"

namespace stasis {

// When content is copied: beside the driver's checkpoint, from memory that the agents have pinned,
// or before the driver does anything. The latter for three reasons: a dump, whose image has to have
// the content when CRIU goes on; a caller that keeps the driver busy as soon as all are quiesced
// (SuspendOptions::on_quiesced); Retry::kCopyFirst.
enum class CopyOrder { kBeside, kFirst };

// What comes after a process tree is quiesced.
enum class Purpose {
  kSuspend,
  kDump,
  kDumpAndGoOn,  // at once, so what there is room for may stay on the GPUs
};

// How a process tree is quiesced.
struct QuiesceOptions {
  bool for_dump() const { return purpose != Purpose::kSuspend; }

  Purpose purpose = Purpose::kSuspend;
  std::chrono::milliseconds timeout{};  // for the gates, and for the driver's lock; zero: none
  bool ignore_obstacles = false;
  MemoryPath path = MemoryPath::kAutomatic;
  const IntoImage* image = nullptr;  // otherwise into the processes' own memory
  // What the error of the try before had, which is told. Of a dump, which begins anew as it was,
  // none: it copies first in any case.
  Retry again = Retry::kNone;
  std::function<void()> on_quiesced = {};  // as in SuspendOptions
  // Of a group of several nodes: nothing is copied or evicted before all its parts are quiesced.
  GroupPart* part = nullptr;
};

// Which processes, by which way and in which order: decided once for each try, before any process
// is touched, from what the user wants and what the try before has found (QuiesceOptions::again).
struct MoveOutPlan {
  // When the contexts of a mover are made (direct/mover_server.h).
  enum class Contexts {
    kAtOnce,          // while the programs run
    kWhenQuiesced,    // the driver has restored one of them before
    kBesideRestored,  // and one of another tree, on the same GPUs, which is held meanwhile
                      // (direct/held_neighbours.h)
  };

  static MoveOutPlan make(const Environment& env, const ProcessTree& tree,
                          const QuiesceOptions& options);
  bool by_driver() const { return path == MemoryPath::kDriver; }
  bool only_agents() const { return path == MemoryPath::kDirect; }
  bool mover_when_quiesced() const { return contexts != Contexts::kAtOnce; }
  bool beside_restored() const { return contexts == Contexts::kBesideRestored; }

  MemoryPath path = MemoryPath::kAutomatic;
  std::string why_driver = {};  // for the user; empty: that was told
  // Of the tree, until that grows.
  std::vector<const Process*> running;
  std::vector<const Process*> locked;  // by another tool
  std::vector<const Process*> left;    // with the driver, by a tool that was killed
  CopyOrder order = CopyOrder::kBeside;
  Contexts contexts = Contexts::kAtOnce;
};

// GpuMemory::move_out().
Result<void> move_out(MemoryState& state, const Environment& env, ProcessTree& tree,
                      const MoveOutPlan& plan, const QuiesceOptions& options, Phases& phases);

}  // namespace stasis
