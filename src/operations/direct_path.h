// The direct path of an operation: the device memory of those processes in a group that have the
// agent is copied by a mover of ours, before the driver checkpoints what is left and after it has
// restored that.
//
// Until dismiss() it brings every process back on every path out, as the group does; the driver's
// lock must be off by then, so the group is rolled back first. Private to src/operations. One
// thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "checkpoint/group.h"
#include "direct/agent_client.h"
#include "direct/mover.h"
#include "operations/operations.h"
#include "operations/phases.h"

namespace stasis {

// How a group is brought to a stop.
struct QuiesceOptions {
  std::chrono::milliseconds timeout{};  // for the gates, and for the driver's lock; zero: none
  bool ignore_obstacles = false;
  bool for_dump = false;
  MemoryPath path = MemoryPath::kAutomatic;
};

class DirectPath {
 public:
  DirectPath() = default;
  DirectPath(DirectPath&& other) noexcept = default;
  DirectPath& operator=(DirectPath&& other) noexcept = default;
  ~DirectPath() { (void)roll_back(); }

  // Processes whose memory has been moved out, or stands still for it.
  std::size_t size() const { return agents_.size(); }
  std::uint64_t bytes() const;

  // Moves the memory of every process of the group out that runs, has the agent and memory that can
  // leave. Where that cannot be, it says so and leaves all to the driver: no failure. An error is
  // one that the driver's lock would end in as well: kTimeout, kInterrupted, kProcessGone,
  // kOutOfHostMemory; then everybody runs again. kNotSupported, before anything is touched: memory
  // that is open in two processes, which only the agents see. With MemoryPath::kDirect what cannot
  // be is a failure.
  // The phases are "prepare", during which the processes run, "close", "copy out" and "empty".
  Result<void> move_out(const Environment& env, Group& group, const QuiesceOptions& options,
                        Phases& phases);
  // Brings the memory of every process of the group back whose agent says that it is away, and lets
  // it go on. To be called when the driver has restored and unlocked them. kOutOfGpuMemory leaves
  // all as it is; by the agents alone if there is no mover, which is slower.
  // Returns the bytes. The phases are "refill", "copy in" and "open".
  Result<std::uint64_t> move_in(const Environment& env, std::vector<const Process*> processes,
                                Phases& phases);
  // Begins to prepare a mover for what of these is away, in a thread of its own, so that it is
  // ready when move_in() needs it.
  void get_ready(const Environment& env, const std::vector<const Process*>& processes);

  // Everybody runs on with its memory. kNotRolledBack names who does not.
  Result<void> roll_back();
  // What was done is meant to stay.
  void dismiss() { agents_.clear(); }

 private:
  Result<void> find(const Environment& env, std::vector<const Process*> processes, bool away);
  Result<void> refuse_shared(const Environment& env, bool ignore) const;
  Result<void> prepare(const Environment& env, Group& group);
  // What MemoryPath::kDirect wants of the processes.
  Result<void> require_all(const std::vector<const Process*>& running) const;
  Result<void> require_nothing_stays() const;
  Result<void> close_all(const Environment& env, std::chrono::milliseconds timeout, Phases& phases);
  Result<void> copy(const Environment& env, bool out);

  std::vector<direct::AgentClient> agents_;
  using MoverResult = Result<std::shared_ptr<direct::MemoryMover>>;
  // What was begun, or what `env` gives now.
  MoverResult take_mover(const Environment& env, std::span<const GpuUuid> gpus);

  std::future<MoverResult> coming_;
  std::shared_ptr<direct::MemoryMover> mover_;
};

}  // namespace stasis
