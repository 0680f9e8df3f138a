// The GPU memory of a group, past the driver: that of processes which have the agent is evicted by
// a mover of ours before the driver checkpoints what is left, and comes back after it has restored
// that.
//
// Until dismiss() it brings every process back on every path out, as the group does; the driver's
// lock must be off by then, so the group is rolled back first. What has gone into an image is read
// back from it, so that must be there until then. Moves. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/phases.h"
#include "checkpoint/group.h"
#include "direct/agent_set.h"
#include "direct/content_sources.h"
#include "direct/environment.h"
#include "direct/move_out.h"
#include "direct/prefetch.h"

namespace stasis {

// What to try after a failure by which all is as it was.
enum class Retry {
  kNone,
  kSame,       // what was in the way is gone
  kCopyFirst,  // CopyOrder::kFirst
  kByDriver,   // MemoryPath::kDriver
};

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

  // Evicts the memory of every process of the group that runs, has the agent and memory that can
  // leave: into the processes' own memory, or into an image. Where that cannot be, it says so and
  // leaves all to the driver: no failure. Of each process with an agent that is left to the driver
  // it tells why. An error is one that the driver's lock would end in as well: kTimeout,
  // kInterrupted, kProcessGone, kOutOfHostMemory for the content (not for the mover), what the
  // image's files fail with; then all processes run again. kNotSupported, before anything is
  // touched: memory that is open in two processes, which only the agents see. With
  // MemoryPath::kDirect what cannot be is a failure. The phases are "prepare", during which the
  // processes run, "close", "mover" if it could not be made before that, "copy out", for an image
  // "content", until it is complete, and "empty". With CopyOrder::kBeside it is still being copied
  // when this returns, where the agents can pin it meanwhile (ADR 33): finish_out() waits for the
  // end.
  Result<void> move_out(const Environment& env, Group& group, const QuiesceOptions& options,
                        Phases& phases) {
    return stasis::move_out(*state_, env, group, options, phases);
  }
  // To be called when the driver has checkpointed them all, before they are left like that. An
  // error means that they have to be rolled back. The phase is "copy out", if there is anything to
  // do.
  Result<void> finish_out(Phases& phases);
  // Waits until nothing is being copied any more. Before any process that the driver holds is let
  // go.
  void wait_for_copy() { state_->mover.wait_for_copy(); }
  // After a move_out() or finish_out() that failed, and a roll-back. `by_driver`: one of its calls
  // failed.
  Retry retry_after(bool by_driver) const;
  // Tells of processes with the agent that the group has got since move_out(), or the last call.
  void tell_of_new(const Environment& env, const Group& group);
  // With the programs' threads kept still: that each agent will be found again by the tool that
  // brings the memory back. Otherwise the next try leaves it to the driver.
  Result<void> expect_agents();

  // Where to look for content that is not in the processes' own memory. What move_out() has moved
  // is known already.
  void look_in(std::shared_ptr<ImageContent> content) { state_->content.look_in(content); }
  // kWrongState, kImageCorrupt if the memory of one of them is away and its content not to be
  // found.
  Result<void> check_found(const Environment& env,
                           const std::vector<const Process*>& processes) const;
  // To be called before it is looked what is free on the GPUs, for content that is prefetched.
  // kInterrupted.
  Result<void> come_back(const Environment& env) {
    return state_->prefetch.come_back(env.interrupt);
  }
  // In the background: a mover for what of these is away, so that it is ready when move_in() needs
  // it.
  void prefetch(const Environment& env, const std::vector<const Process*>& processes,
                std::span<const GpuPair> pairs) {
    state_->prefetch.begin(env, processes, pairs);
  }
  // The same for the content that the image which look_in() was given has of these, to the GPUs for
  // which there is room.
  void prefetch(const Environment& env, const std::vector<Pid>& pids, const PrefetchRoom& room) {
    state_->prefetch.begin(env, pids, room);
  }
  // Waits until that mover is made, if one is. To be called before any of them runs: no context may
  // be made beside a kernel of one that the driver has restored (direct/mover_server.h).
  void settle() { state_->mover.settle(); }
  // To be called before the driver restores them. Lets go of what is held on the GPUs if others
  // have taken so much since that not all of `needed` has room beside it.
  void make_room(Driver& driver, std::span<const GpuUse> needed, std::span<const GpuPair> pairs) {
    state_->prefetch.make_room(driver, needed, pairs);
  }
  // Brings the memory of every process of the group back whose agent says that it is away, and lets
  // it go on. To be called when the driver has restored and unlocked them. kOutOfGpuMemory leaves
  // all as it is; by the agents alone if there is no mover, which is slower.
  // Returns the bytes. The phases are "refill", "copy in" and "open".
  // `stops`: an interrupt ends it, and the caller has to end the processes; otherwise going on is
  // the way out.
  Result<std::uint64_t> move_in(const Environment& env,
                                const std::vector<const Process*>& processes, Phases& phases,
                                bool stops = false);

  // All processes run on with their memory. kNotRolledBack names those that do not.
  Result<void> roll_back();
  // Those too whose memory was away before: the tool that did that was killed, and as all is rolled
  // back they are to run. The driver must hold none of the group. Where it had not come to hold
  // one, the agent makes it run by itself.
  void take_held(const Environment& env, const Group& group);
  // A process that had become another program by then, once: nothing of it could be brought back.
  std::optional<Error> take_gone();
  // What was done is meant to stay.
  void dismiss() { state_->agents.clear(); }

  // The content of what move_out() has moved into the image, for its manifest. Nothing if nothing
  // has.
  const ContentRecord* content() const;
  // Bytes of it that an earlier image had already.
  std::uint64_t taken_bytes() const;
  // All of it went past the page cache.
  bool direct_io() const;
  // A process's memory is in that image and nowhere else.
  bool needs_image() const { return state_->content.needs_image(); }

 private:
  std::unique_ptr<MemoryState> state_;  // its parts know each other
};

}  // namespace stasis
