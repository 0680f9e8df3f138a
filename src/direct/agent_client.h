// A tool's end of the page that the agent in a target keeps (agent_protocol.h).
//
// Owns the mapping and the lock on it: while it lives, this is the agent's peer, and if it goes
// while the target stands still, the agent makes it run again by itself, unless it is held. Moves,
// never copies. One thread at a time.
#pragma once

#include <fcntl.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abi/agent_protocol.h"
#include "base/cuda_state.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "base/units.h"
#include "direct/agent_probe.h"
#include "direct/content.h"
#include "proc/address_space.h"

namespace stasis::direct {

// What of a target's memory a segment is.
struct SegmentPlace {
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;   // of its content
  std::uint64_t address = 0;  // in the target; 0: nowhere now
  GpuUuid gpu;
};

// A piece that the process shares with others.
struct Share {
  ShareId id{};
  std::uint64_t bytes = 0;
  ShareRole role = ShareRole::kOwner;
  std::uint32_t open = 0;  // as in AgentShare
  bool has_lost_owner() const { return role == ShareRole::kImporter && open == kOwnerLost; }
  bool is_given_up() const { return role == ShareRole::kImporter && open == kGivenUp; }
  bool of_host = false;  // an owner's: the driver cannot restore it
  bool is_piece() const { return role != ShareRole::kLender && role != ShareRole::kHolder; }
  bool is_import() const { return role == ShareRole::kImporter || role == ShareRole::kForeign; }
};

// A mover that has lost its owner in the middle of a copy has a lock() for ten seconds at most
// (mover_server.cc).
inline constexpr std::chrono::milliseconds kPeerEnds{12000};

class AgentClient {
 public:
  // Nothing if there is no agent in the process. kNotSupported for one of another version, and for
  // a page that names itself the process's and is not mapped in it; kBusy if it has a peer, which
  // after `timeout` it still has; kNotPermitted: it wants the permission to trace the process.
  // `pidfd` holds the process that is meant. From here on all is done in the address space that has
  // the page now: see has_left(). kTimeout: so much that has to be looked through that `until` was
  // over.
  static Result<std::optional<AgentClient>> find(
      Pid pid, const Pidfd& pidfd, std::chrono::milliseconds timeout = kPeerEnds,
      Clock::time_point until = Clock::time_point::max());

  Pid pid() const { return pid_; }
  const Pidfd& pidfd() const { return pidfd_; }
  // Of the program that has the page.
  const std::shared_ptr<const proc::AddressSpace>& address_space() const { return space_; }
  // Which request to stop ends the waiting for an answer. Commands that bring memory back are only
  // left at the second, and not within ten seconds: the agent goes on with them by itself when its
  // peer has gone.
  enum class Heeds { kFirst, kSecond };
  // `interrupt` must outlive this, or be taken back with null.
  void heed(const Interrupt* interrupt, Heeds heeds) {
    interrupt_ = interrupt;
    heeds_ = heeds;
  }
  // From here on memory is brought back, and nothing of that can be left at the first.
  void heed_second_only() { heeds_ = Heeds::kSecond; }
  // The target names its size, and how long its peer waits goes by that: kNotSupported if it is
  // more than all GPUs have together, in bytes, which is only asked where that can be.
  using GpuMemory = std::function<std::uint64_t()>;
  Result<void> check_size(const GpuMemory& of_all_gpus) const;
  // False: the program has closed the page's descriptor, and no other tool will find the agent.
  bool can_be_found() const;
  // The agent takes its peer for alive until this is closed, too.
  UniqueFd lock() const { return UniqueFd(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)); }
  AgentState state() const;
  // As of the last kPrepare or kClose.
  std::uint64_t bytes() const { return figures_.bytes; }
  std::uint32_t segment_count() const { return figures_.segments; }
  std::uint64_t buffer_address() const { return figures_.buffer_address; }
  std::uint64_t buffer_bytes() const { return figures_.buffer_bytes; }
  std::uint64_t staying_bytes() const { return figures_.staying_bytes; }
  // While its memory is away.
  const ContentId& content_id() const { return figures_.content_id; }
  bool content_is_elsewhere() const { return figures_.content_id != ContentId{}; }
  // As of the last answer: pieces that the driver has open here and in another process by CUDA IPC,
  // multicast objects, all that the process shares with others, with what the driver cannot restore
  // besides, and those that it has given up.
  std::uint32_t driver_share_count() const { return figures_.driver_shares; }
  std::uint32_t multicast_count() const { return figures_.multicasts; }
  std::uint32_t share_count() const { return figures_.shares; }
  // A tool has looked, and there were few zeros: remembered in the process itself, for as long as
  // it has not much more memory than then.
  bool has_few_zeros() const;
  void note_few_zeros(bool few);
  // Of managed memory, there or given up.
  std::uint64_t managed_areas() const { return figures_.managed_areas; }
  std::uint32_t detached_count() const { return figures_.detached; }

  // From here on until end_precopy() a tool has the program's memory mapped while the program
  // runs, which waits for that end when it gives memory back. False: the agent does not know how.
  bool begin_precopy();
  void end_precopy();
  // By any thread.
  bool wants_its_memory() const;

  // Whether the last command was answered: without that the agent may still be at it.
  bool has_answered() const { return page_->reply.load(std::memory_order_acquire) == number_; }

  // The process runs another program: exec has taken the page, and the agent with it.
  bool has_left() const {
    if (!pidfd_.alive()) return false;
    const auto current = space_->check_current();
    return !current && current.error().code == ErrorCode::kProcessGone;
  }

  // One command and its answer. kNoAnswer after `timeout`, and then others get little of theirs;
  // kProcessGone, also if the process has become another program by exec; kTimeout for
  // CUDA_ERROR_NOT_READY, kOutOfGpuMemory, kNotSupported, else kDriverError with the agent's words.
  Result<void> ask(AgentCommand command, std::uint64_t argument, std::chrono::milliseconds timeout);
  // The same in two steps, so that several agents work at the same time.
  void begin(AgentCommand command, std::uint64_t argument);
  void begin(AgentCommand command, const ContentId& arguments);
  Result<void> finish(std::chrono::milliseconds timeout);
  // As finish(), and when `interrupt` asks to stop, the agent is asked to give up the closing of
  // its gate: kTimeout then, within milliseconds.
  Result<void> finish_unless(const Interrupt& interrupt, std::chrono::milliseconds timeout);

  using Fill = std::function<Result<void>(const AgentClient&)>;
  // Takes its memory again, with its content; the gate stays closed. As bring_back().
  Result<void> repopulate(const Fill& fill = {});
  // Makes the program run with its memory, whatever the agent's state, by the agent alone, which
  // needs no mover and takes its time. The driver must not hold the process. `fill` writes content
  // that is elsewhere into the buffer; without it such a process stays as it is, kWrongState.
  // `before_open` is called when only the gate is still closed.
  Result<void> bring_back(const Fill& fill = {},
                          const std::function<Result<void>(AgentClient&)>& before_open = {});

  // All of its memory, to be mapped by a mover, and if `places` is given what each piece is. kBusy
  // if there are no descriptors left; kProcessGone if the process has become another program
  // meanwhile, and then nothing of it is kept. `timeout` is for all of them together.
  Result<std::vector<Segment>> take_segments(std::chrono::milliseconds timeout,
                                             std::vector<SegmentPlace>* places = nullptr);

  // What the process shares with others. kInternal for more than any program has. `timeout` is for
  // all answers together.
  Result<std::vector<Share>> shares(std::chrono::milliseconds timeout);
  // A descriptor of the process's own piece, to be imported by another.
  Result<UniqueFd> borrow(const ShareId& id, std::chrono::milliseconds timeout);
  // The process imports these pieces again, and maps them where they were.
  using Lent = std::pair<ShareId, const UniqueFd*>;
  Result<void> attach(const std::vector<Lent>& pieces, std::chrono::milliseconds timeout);

 private:
  // The one that the last answer names.
  Result<UniqueFd> take_only_descriptor(const FileCheck& accept) const;
  // Taken from the page once after each answer: it belongs to the target, which can write there
  // what it likes while we look.
  struct Figures {
    std::uint64_t bytes = 0;
    std::uint32_t segments = 0;
    std::uint64_t buffer_address = 0;
    std::uint64_t buffer_bytes = 0;
    std::uint64_t staying_bytes = 0;
    ContentId content_id{};
    std::uint32_t driver_shares = 0;
    std::uint32_t multicasts = 0;
    std::uint32_t shares = 0;
    std::uint32_t detached = 0;
    std::uint64_t managed_areas = 0;
  };
  void take_figures();
  Result<void> wait_for_reply(const Interrupt& interrupt, Clock::time_point deadline);

  AgentClient(Pidfd pidfd, std::shared_ptr<const proc::AddressSpace> space, UniqueFd file,
              ControlPage* page)
      : pid_(space->pid()),
        pidfd_(std::move(pidfd)),
        space_(std::move(space)),
        file_(std::move(file)),
        page_(page) {}

  Pid pid_;
  Pidfd pidfd_;  // of its own: the caller's may be closed first
  std::shared_ptr<const proc::AddressSpace> space_;
  UniqueFd file_;  // with the lock
  struct Unmap {
    void operator()(ControlPage* page) const;
  };
  std::unique_ptr<ControlPage, Unmap> page_;
  Figures figures_;
  AgentCommand asked_ = AgentCommand::kNone;
  Clock::time_point asked_at_;
  std::uint32_t number_ = 0;  // of the request under way
  // Since when the user waits for what is under way.
  Clock::time_point waiting_since() const;
  void note_silence();
  // Whether the user wants to wait no longer for the answer under way.
  Result<void> wants_to_leave() const;

  const Interrupt* interrupt_ = nullptr;
  Heeds heeds_ = Heeds::kSecond;
  bool silent_ = false;  // it has not answered in time once
  Clock::time_point silent_since_;
  // When the first of several commands was given that are one to the user.
  std::optional<Clock::time_point> first_at_;
};

// What an agent is given for what takes the driver's time: mapping 16 GiB takes 4 ms, unmapping 10
// (H100, 580.159.04). And for copying, which is never this slow but when it hangs.
inline constexpr std::chrono::milliseconds kMappingTimeout{60000};
std::chrono::milliseconds copy_time(std::uint64_t bytes);

// The command's name for people: "close the gate".
const char* agent_command_name(AgentCommand command);

}  // namespace stasis::direct
