// The agents of the processes whose GPU memory is being moved, which work on one command all at the
// same time. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/process.h"
#include "direct/agent_client.h"
#include "direct/environment.h"

namespace stasis {

// The deadline of an agent for what it does at once, and for what takes the driver's time.
inline constexpr std::chrono::milliseconds kAtOnce{5000};
inline constexpr std::chrono::milliseconds kMapping = direct::kMappingTimeout;

// Tells that the driver moves memory, and why; for those processes that have the agent.
void tell_of_driver(const Environment& env, const std::string& why);
void tell_of_driver(const Environment& env, std::vector<const Process*> processes,
                    const std::string& why);

// AgentClient::find() with its usual deadline; the progress shows the wait. kInterrupted only if it
// `may_stop`.
Result<std::optional<direct::AgentClient>> find_agent(const Environment& env,
                                                      const Process& process, bool may_stop);
// Whether the error comes of another tool at work, or of a stop that was requested, and not of the
// agent.
bool is_held_up(const Error& error);
// Failures that the driver path would meet as well: there is no point in trying it.
bool final_for_both(ErrorCode code);
// An agent of another version, in a process that went by the driver path.
bool has_nothing_to_bring_back(Pid pid);
// AgentClient::check_size() by what the GPUs of this machine have.
Result<void> check_size(const direct::AgentClient& agent, Driver& driver);

// kNotSupported if any of these has pieces of GPU memory open together with another process by CUDA
// IPC that the driver serves; with `ignore` the user is told of it, and no more.
Result<void> refuse_shared(const Environment& env,
                           const std::vector<std::pair<Pid, std::uint32_t>>& pieces, bool ignore);

// The pieces of an agent. What the page says is the target's to write: kInternal for pieces outside
// its content, or, with `buffer`, outside its buffer.
Result<std::vector<direct::Segment>> take_checked(direct::AgentClient& agent, bool buffer,
                                                  std::vector<direct::SegmentPlace>* places);
// The same of several, which export theirs at the same time; in their order. The first error.
struct PiecesAsked {
  direct::AgentClient* agent = nullptr;
  bool buffer = false;
};
struct Pieces {
  std::vector<direct::Segment> segments;
  std::vector<direct::SegmentPlace> places;
};
Result<std::vector<Pieces>> take_checked(const std::vector<PiecesAsked>& asked);
// Adds `more`, whose content begins at `base`, to `all`.
void append(std::vector<direct::Segment>& all, std::vector<direct::Segment> more,
            std::uint64_t base);

class AgentSet {
 public:
  using Agents = std::vector<direct::AgentClient>;
  Agents::iterator begin() { return agents_.begin(); }
  Agents::iterator end() { return agents_.end(); }
  Agents::const_iterator begin() const { return agents_.begin(); }
  Agents::const_iterator end() const { return agents_.end(); }
  bool empty() const { return agents_.empty(); }
  std::size_t size() const { return agents_.size(); }
  std::uint64_t bytes() const;
  bool has(Pid pid) const;
  void add(direct::AgentClient agent) { agents_.push_back(std::move(agent)); }
  // Leaves them as they are.
  void clear() { agents_.clear(); }
  void drop_ended();
  // kProcessGone if one has ended that shares memory: an image without it holds what nothing can
  // restore.
  Result<void> check_sharers_live() const;
  void drop_running();

  // Adds the agents of those processes whose memory is there. A process whose agent cannot be asked
  // is left to the driver, and the user is told; an error is one that the driver path would meet as
  // well.
  Result<void> find_running(const Environment& env, const std::vector<const Process*>& processes);
  // Adds those whose memory is away.
  Result<void> find_evicted(const Environment& env, const std::vector<const Process*>& processes);

  // What they have, while their programs run; with `buffers` in the host memory that it goes to.
  // Forgets those that have nothing to give away.
  Result<void> prepare(Driver& driver, bool buffers);
  bool is_without_memory(Pid pid) const { return without_memory_.contains(pid); }
  // Checks that no agent claims more memory than the GPUs have.
  Result<void> check_sizes(Driver& driver) const;
  // Makes room for the descriptors that their pieces take until the mover has them. kNotSupported.
  Result<void> allow_pieces() const;
  // Of each, the pieces that refuse_shared() is about.
  std::vector<std::pair<Pid, std::uint32_t>> driver_shares() const;

  // All agents pin what they will give up. False: one cannot, and none does.
  bool pin();
  // Lets go of what is pinned.
  Result<void> unpin();
  // The agents give their GPU memory up; its content is where `content` says.
  Result<void> evict(const direct::ContentId& content);
  // Tries once to take GPU memory again for those that have none.
  Result<void> repopulate();
  // Whether all have few zeros, and that they have, or not.
  bool have_few_zeros() const;
  void note_few_zeros(bool few);
  // Their programs run on.
  Result<void> open();

 private:
  // Of all of them at the same time. The last error.
  Result<void> ask_all(direct::AgentCommand command, const direct::ContentId& arguments = {});
  Result<bool> settle(direct::AgentClient& agent, const Environment& env,
                      direct::Direction direction);

  Agents agents_;
  std::set<Pid> without_memory_;
};

}  // namespace stasis
