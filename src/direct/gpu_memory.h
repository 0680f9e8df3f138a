// The direct path of an operation: the device memory of those processes in a group that have the
// agent is copied by a mover of ours, before the driver checkpoints what is left and after it has
// restored that.
//
// Until dismiss() it brings every process back on every path out, as the group does; the driver's
// lock must be off by then, so the group is rolled back first. What has gone into an image is read
// back from it, so that must be there until then. Private to src/operations. One thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/phases.h"
#include "checkpoint/gpu_reservation.h"
#include "checkpoint/group.h"
#include "direct/agent_client.h"
#include "direct/environment.h"
#include "direct/image_content.h"
#include "direct/mover.h"

namespace stasis {

// An image that is being written, as the place for what the mover moves.
struct IntoImage {
  const UniqueFd& image_dir;
  ContentOptions options;
};

// How a group is brought to a stop.
struct QuiesceOptions {
  std::chrono::milliseconds timeout{};  // for the gates, and for the driver's lock; zero: none
  bool ignore_obstacles = false;
  bool for_dump = false;
  MemoryPath path = MemoryPath::kAutomatic;
  const IntoImage* image = nullptr;    // otherwise into the processes' own memory
  bool comes_back = false;             // at once, so what there is room for may stay on the GPUs
  bool copies_first = false;           // before the driver does anything; as with an image
  std::function<void()> at_rest = {};  // as in SuspendOptions
  bool reason_is_told = false;         // why the path is the driver's
};

// kNotSupported if any of these has pieces of GPU memory open together with another process by CUDA
// IPC; with `ignore` it is told and no more.
Result<void> refuse_shared(const Environment& env,
                           const std::vector<std::pair<Pid, std::uint32_t>>& pieces, bool ignore);

// Where content may be brought before there is memory for it.
struct HeadStart {
  std::map<GpuUuid, std::uint64_t> room;  // bytes that nobody needs until then
  std::vector<GpuPair> pairs;             // where what was on one GPU goes
  std::uint64_t host_bytes = 0;           // that will be taken meanwhile under our own limits
};

// AgentClient::find() with its usual patience, of which the progress tells. kInterrupted only if it
// `may_stop`.
Result<std::optional<direct::AgentClient>> find_agent(const Environment& env,
                                                      const Process& process, bool may_stop);
// That error is of somebody else at work, or of who asks us to stop, and not of the agent.
bool is_held_up(const Error& error);

// Bytes of host memory that a mover takes.
std::uint64_t mover_memory(const Environment& env, std::span<const GpuUuid> gpus);

class CompositeContent;

class GpuMemory {
 public:
  GpuMemory();
  GpuMemory(GpuMemory&& other) noexcept = default;
  GpuMemory& operator=(GpuMemory&&) = delete;  // what it holds has to be rolled back first
  ~GpuMemory() { (void)roll_back(); }

  // Processes whose memory has been moved out, or stands still for it.
  std::size_t size() const { return agents_.size(); }
  std::uint64_t bytes() const;

  // Moves the memory of every process of the group out that runs, has the agent and memory that can
  // leave: into the processes' own memory, or into an image. Where that cannot be, it says so and
  // leaves all to the driver: no failure. Of each process with an agent that is left to the driver
  // it tells why. An error is one that the driver's lock would end in as
  // well: kTimeout, kInterrupted, kProcessGone, kOutOfHostMemory for the content (not for the
  // mover), what the image's files fail with; then everybody runs again. kNotSupported, before
  // anything is touched: memory that is open in two processes, which only the agents see. With
  // MemoryPath::kDirect what cannot be is a failure. The phases are "prepare", during which the
  // processes run, "close", "mover" if it could not be made before that, "copy out", for an image
  // "content", until it is complete, and "empty". Into the processes' own memory it is still being
  // copied when this returns, where their agents can keep it alive meanwhile (ADR 33): finish_out()
  // waits for the end.
  Result<void> move_out(const Environment& env, Group& group, const QuiesceOptions& options,
                        Phases& phases);
  // To be called when the driver has checkpointed them all, before they are left like that. An
  // error means that they have to be rolled back. The phase is "copy out", if there is anything to
  // do.
  Result<void> finish_out(Phases& phases);
  // Waits until nothing is being copied any more. Before anybody whom the driver holds is let go.
  void wait_for_copy();
  // Whether memory was given up before it was copied, and whether that copy came to grief. It can
  // be done the other way round (copies_first).
  bool copied_beside() const { return copied_.has_value(); }
  bool copy_failed() const { return copied_ && !*copied_; }
  // The mover has had all the time that it is given, and another would take as much once more.
  bool copy_was_silent() const { return copy_failed() && mover_ && mover_->was_silent(); }
  // Whether somebody was found half-way suspended, by who was killed then; as all is rolled back he
  // runs, and can be suspended.
  bool found_half_way() const { return half_way_; }
  // Tells of processes with the agent that the group has got since move_out(), or the last call.
  void tell_of_new(const Environment& env, const Group& group);
  // With the programs' threads kept still: that each agent will be found again, by whoever brings
  // the memory back. Otherwise the next try leaves it to the driver.
  Result<void> expect_agents();
  bool lost_agent() const { return lost_agent_; }
  // Where to look for content that is not in the processes' own memory. What move_out() has moved
  // is known already.
  void look_in(std::shared_ptr<ImageContent> content) { contents_.push_back(std::move(content)); }
  // kWrongState, kImageCorrupt if the memory of one of them is away and its content not to be
  // found.
  Result<void> check_found(const Environment& env,
                           const std::vector<const Process*>& processes) const;
  // Brings the memory of every process of the group back whose agent says that it is away, and lets
  // it go on. To be called when the driver has restored and unlocked them. kOutOfGpuMemory leaves
  // all as it is; by the agents alone if there is no mover, which is slower.
  // Returns the bytes. The phases are "refill", "copy in" and "open".
  // `stops`: an interrupt ends it, and whoever asked has to end the processes; otherwise going on
  // is the way out.
  Result<std::uint64_t> move_in(const Environment& env,
                                const std::vector<const Process*>& processes, Phases& phases,
                                bool stops = false);
  // To be called before it is looked what is free on the GPUs, for content that goes ahead.
  // kInterrupted.
  Result<void> come_back(const Environment& env) { return room_.come_back(env.interrupt); }
  // Begins to prepare a mover for what of these is away, in a thread of its own, so that it is
  // ready when move_in() needs it.
  void get_ready(const Environment& env, const std::vector<const Process*>& processes,
                 std::span<const GpuPair> pairs);
  // The same for the content that the image which look_in() was given has of these, and begins to
  // bring it to the GPUs for which there is room.
  void get_ready(const Environment& env, const std::vector<Pid>& pids, const HeadStart& start);
  // Waits until that mover is made, if one is. To be called before any of them runs: no context may
  // be made beside a kernel of one that the driver has restored (direct/mover_server.h).
  void settle();

  // To be called before the driver restores them. Lets go of what is held on the GPUs if others
  // have taken so much since that not all of `needed` has room beside it.
  void make_room(Driver& driver, std::span<const GpuUse> needed, std::span<const GpuPair> pairs);

  // Everybody runs on with its memory. kNotRolledBack names who does not.
  Result<void> roll_back();
  // Those too whose memory was away before: who did that was killed, and as all is rolled back they
  // are to run. The driver must hold none of the group. Where it had not come to hold one, the
  // agent makes it run by itself.
  void take_held(const Environment& env, const Group& group);
  // Who had become another program by then, once: nothing of his could be brought back.
  std::optional<Error> take_gone() { return std::exchange(gone_, std::nullopt); }
  // What was done is meant to stay.
  void dismiss() { agents_.clear(); }

  // The content of what move_out() has moved into the image, for its manifest. Nothing if nothing
  // has.
  const ContentRecord* content() const { return into_ ? &into_->record() : nullptr; }
  // Bytes of it that an earlier image had already.
  std::uint64_t taken_bytes() const { return into_ ? into_->taken_bytes() : 0; }
  // All of it went past the page cache.
  bool direct_io() const { return into_ && into_->direct_io(); }
  // Somebody's memory is in that image and nowhere else.
  bool needs_image() const { return needs_image_; }

 private:
  Result<void> find(const Environment& env, const std::vector<const Process*>& processes,
                    bool away);
  std::vector<std::pair<Pid, std::uint32_t>> shared_pieces() const;
  // What MemoryPath::kDirect wants of the processes.
  Result<void> require_all(const std::vector<const Process*>& running) const;
  Result<void> require_nothing_stays() const;
  // Begins to make a mover, or as much of it as may be made while they run.
  Result<void> prepare(const Environment& env, Group& group, bool buffers);
  // The mover, ready for all that it is to do.
  Result<void> have_mover(const Environment& env, Group& group, const QuiesceOptions& options);
  // With a fresh mover if this one has come to grief.
  Result<void> prepare_digests(const Environment& env);
  // Whether the host has memory for what was allocated since prepare(), if anything was.
  Result<void> check_growth(Group& group) const;
  // Closes all gates, and locks those of the group that have none of ours, or nothing to move: one
  // that waits on its GPU for a closed one could not be locked later. Forgets who has ended.
  Result<void> hold_back(const Environment& env, Group& group, std::chrono::milliseconds timeout,
                         Phases& phases);
  // Makes the place where the content goes, and removes it: nothing goes there.
  Result<void> begin_image(const Environment& env, const IntoImage& image);
  Result<void> end_image(const IntoImage* image);
  // No process of those that ran can run as long as the gates are closed.
  bool all_behind_gates(const Group& group) const;
  // kWrongState if one's memory was given up but not copied.
  Result<void> refuse_half_way(const Group& group);
  // What all agents give, in the places where it goes.
  Result<std::vector<direct::Segment>> take_all(const IntoImage* image);
  Result<void> copy_out(const Environment& env, const IntoImage* image);
  // Whether all agents keep what they will give up.
  bool keep();
  // Begins to copy what the agents keep, in a thread of its own, and lets them give it up.
  Result<void> copy_beside(const Environment& env);
  // Lets the agents go of what they keep.
  Result<void> drop_kept();
  // Lets the mover keep on the GPUs what it is about to copy out, as far as there is room.
  void keep_on_gpus(Driver& driver, const Group& group);
  // Into those that are being filled.
  Result<void> copy_in(const Interrupt& interrupt);
  Result<void> empty();
  // Its content, if that is in an image.
  struct Found {
    std::shared_ptr<ImageContent> image;  // nothing: it is in the process's own memory
    std::size_t stream = 0;
  };
  Result<Found> content_of(const direct::AgentClient& agent) const;
  Result<void> bring_back(direct::AgentClient& agent) const;
  // Who restores ends them where the image proves damaged; otherwise they need somebody's help.
  Result<void> bring_back_all(bool ends_them);

  std::vector<direct::AgentClient> agents_;
  std::set<Pid> known_;           // members of the group that were told of, or need not be
  std::set<Pid> without_memory_;  // their agents have none to give away
  // The driver has restored one of them before: no context may be made while they run
  // (direct/mover_server.h).
  bool held_before_ = false;
  std::vector<GpuUuid> gpus_;           // that they use
  std::map<Pid, std::uint64_t> ready_;  // where the buffers are that prepare() has touched
  using MoverResult = Result<std::shared_ptr<direct::MemoryMover>>;
  // What was begun, or what `env` gives now.
  MoverResult take_mover(const Environment& env, const MoverRequest& needs);
  // Where what is away of these comes back, as far as it was written down.
  void take_gpus(const std::vector<const Process*>& processes, std::span<const GpuPair> pairs);
  void add_gpu(const GpuUuid& gpu);
  // To bring back what is away, `in_images` of it in images.
  MoverResult take_mover_back(const Environment& env, std::uint64_t in_images);

  // To make a mover, and to bring these to the GPUs, in a thread of its own.
  void begin(const Environment& env, std::vector<direct::Ahead> ahead);
  // What was begun is told to stop, and its mover is ours again.
  void collect_mover();
  // Whether something was held on the GPUs that is gone now.
  bool let_go_ahead();
  // Lets go of it if it may not be there besides the processes' own memory.
  void claim_both();
  Result<void> refill();

  std::vector<std::shared_ptr<ImageContent>> contents_;
  std::shared_ptr<ImageContent> into_;  // that move_out() has made
  bool needs_image_ = false;
  std::optional<Error> gone_;  // who was not there any more to be brought back
  bool half_way_ = false;
  bool lost_agent_ = false;

  struct Copied {
    std::shared_ptr<direct::MemoryMover> mover;
    Result<void> done;
  };
  std::future<Copied> copying_;
  std::optional<Result<void>> copied_;  // what became of it

  std::future<MoverResult> coming_;
  std::shared_ptr<direct::MemoryMover> mover_;
  // Of what is brought ahead, or has stayed: where its content is, and the word to stop.
  std::shared_ptr<CompositeContent> content_at_;
  std::shared_ptr<Interrupt> enough_;
  bool ahead_ = false;  // there is something on the GPUs, or to be brought
  GpuRoom room_;
};

}  // namespace stasis
