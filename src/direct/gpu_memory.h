// The GPU memory of a tree by the direct path: the mover evicts the memory of processes that have
// the agent before the driver checkpoints what is left, and copies it in after the driver has
// restored that. The destructor rolls back every process unless dismiss() was called, as the
// tree's does. The driver's lock must be off by then, so the tree is rolled back first. What has
// gone into an image is read back from it, so the image must be there until then. Moves. One thread
// at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/phases.h"
#include "checkpoint/gpu_room.h"
#include "checkpoint/process_tree.h"
#include "direct/agent_set.h"
#include "direct/content_sources.h"
#include "direct/environment.h"
#include "direct/left_to_driver.h"
#include "direct/move_out.h"
#include "direct/prefetch.h"

namespace stasis {

class GpuMemory {
 public:
  GpuMemory() : state_(std::make_unique<MemoryState>()) {}
  GpuMemory(GpuMemory&& other) noexcept = default;
  GpuMemory& operator=(GpuMemory&&) = delete;  // what it holds has to be rolled back first
  ~GpuMemory() {
    if (state_) (void)roll_back();
  }

  // Bytes of the processes whose memory has been moved out, or stands still for it.
  std::uint64_t bytes() const { return state_->agents.bytes(); }

  // Evicts the memory of every process of the tree that runs and has the agent and memory that can
  // leave: into the processes' own memory, or into an image. Where that is not possible, it says so
  // and leaves all to the driver: no failure. For each process with an agent that is left to the
  // driver it says why. An error is one that the driver's lock would end in as well: kTimeout,
  // kInterrupted, kProcessGone, kOutOfHostMemory for the content (not for the mover), what the
  // image's files fail with; then all processes run again. kNotSupported, before anything is
  // touched: memory that is open in two processes, which only the agents see. With
  // MemoryPath::kDirect what cannot be evicted is a failure. The phases are "prepare", during which
  // the processes run, "close", "mover" if it could not be made before that, "copy out", for an
  // image "content", until it is complete, and "evict". With CopyOrder::kBeside the mover still
  // copies when this returns, where the agents can pin it meanwhile (ADR 33): finish_out() waits
  // for the end.
  Result<void> move_out(const Environment& env, ProcessTree& tree, const MoveOutPlan& plan,
                        const QuiesceOptions& options, Phases& phases) {
    return stasis::move_out(*state_, env, tree, plan, options, phases);
  }
  // Called when the driver has checkpointed all processes, before they are left like that. After an
  // error they have to be rolled back: kProcessGone, AgentSet::check_sharers_live(). The phase is
  // "copy out", if there is anything to do.
  Result<void> finish_out(Phases& phases);
  // Waits until the mover copies no more. Called before any process that the driver holds is let
  // go. Enters into `why`, the failure that it is called for, what the copy says to try next.
  void wait_for_copy(Error& why);
  // Tells which processes with the agent the tree has got since move_out(), or since the last
  // call.
  void tell_of_new(const Environment& env, const ProcessTree& tree);
  // Called when the driver has locked all that are left to it: refuse_late_sharing().
  Result<void> refuse_late_sharing(const Environment& env, const ProcessTree& tree,
                                   MemoryPath path) const {
    return stasis::refuse_late_sharing(env, tree, state_->agents, path);
  }
  // Called with the programs' threads kept still: checks that the tool that brings the memory back
  // will find each agent again. Otherwise the next try leaves the memory to the driver.
  Result<void> expect_agents();

  // Where to look for content that is not in the processes' own memory. What move_out() has moved
  // is known already.
  void add_image(std::shared_ptr<ImageContent> content) { state_->content.add_image(content); }
  // kWrongState, kImageCorrupt if the memory of one of them is away and its content not to be
  // found.
  Result<void> check_found(const Environment& env,
                           const std::vector<const Process*>& processes) const;
  // Called before the operation looks what is free on the GPUs, for content that is prefetched.
  // kInterrupted.
  Result<void> come_back(const Environment& env) {
    return state_->prefetch.come_back(env.interrupt);
  }
  // Makes a mover in the background, if memory of one of these processes is away, so that it is
  // ready when move_in() needs it.
  void prefetch(const Environment& env, const std::vector<const Process*>& processes,
                std::span<const GpuPair> pairs) {
    state_->prefetch.begin(env, processes, pairs);
  }
  // The same, and prefetches the content that the image given to add_image() has of these
  // processes, to the GPUs that have room for it.
  void prefetch(const Environment& env, const std::vector<Pid>& pids, const PrefetchRoom& room) {
    state_->prefetch.begin(env, pids, room);
  }
  // Called before that, and before the driver checkpoints or restores: holds the programs of other
  // trees that were restored before, if that is not done, until finish_out() or move_in() is done
  // or this ends (direct/held_neighbours.h). `longest`: zero for the usual time.
  Result<void> hold_neighbours(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                               const std::set<GpuUuid>& gpus, std::chrono::milliseconds longest);
  void release_neighbours() { state_->neighbours.reset(); }
  // Waits until that mover is made, if one is begun. Called before any of the processes runs: no
  // context may be made beside a kernel of a process that the driver has restored
  // (direct/mover_server.h).
  void settle() { state_->mover.settle(); }
  // Called before the driver restores the processes. Lets go of the prefetched content if other
  // programs have taken so much since that not all of `needed` has room beside it.
  void make_room(Driver& driver, std::span<const GpuUse> needed, std::span<const GpuPair> pairs) {
    state_->prefetch.make_room(driver, needed, pairs);
  }
  // Brings back the memory of every process whose agent says that it is away, and lets the process
  // go on. Called when the driver has restored and unlocked the processes. kOutOfGpuMemory leaves
  // all as it is. If there is no mover the agents copy by themselves, which is slower. Returns the
  // bytes. The phases are "repopulate", "copy in" and "open". `room` is held until the agents have
  // taken the memory.
  Result<std::uint64_t> move_in(const Environment& env,
                                const std::vector<const Process*>& processes, Phases& phases,
                                IfItFails if_it_fails = IfItFails::kTheyStandStill,
                                GpuRoom room = {});

  // All processes run on with their memory. kNotRolledBack names those that do not.
  Result<void> roll_back();
  // Adds the processes whose memory was away before: the tool that evicted it was killed, and as
  // all is rolled back they are to run. The driver must hold no process of the tree. Where it had
  // not come to hold a process, the agent makes it run by itself.
  void take_held(const Environment& env, const ProcessTree& tree);
  // The error of a process that had become another program by then, told once: nothing of it could
  // be brought back.
  std::optional<Error> take_gone();
  // What was done is meant to stay.
  void dismiss() { state_->agents.clear(); }

  // The record of what move_out() has moved into the image, for its manifest. Nothing if it has
  // moved nothing there.
  const ContentRecord* content() const;
  // Bytes of it that an earlier image had already.
  std::uint64_t reused_bytes() const;
  // Of these, what was pre-copied and is in the image.
  std::uint64_t precopied_bytes() const;
  // The image's room for what was pre-copied in vain is free again. When the programs run.
  void give_back_room();
  // All of it went past the page cache.
  bool direct_io() const;
  // A process's memory is in that image and nowhere else.
  bool needs_image() const { return state_->content.needs_image(); }

 private:
  std::unique_ptr<MemoryState> state_;  // its parts know each other
};

}  // namespace stasis
