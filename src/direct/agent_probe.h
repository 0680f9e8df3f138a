// What a tool sees of an agent without being its peer: it takes no lock, and waits for none.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "abi/agent_protocol.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "base/units.h"

namespace stasis::direct {

// Of content that is in an image and not in the target's buffer: the checksum of the image's index.
// All zero: it is in the buffer.
using ContentId = std::array<std::uint64_t, 2>;

// What the page says to a tool that only probes.
struct ProbedAgent {
  AgentState state = AgentState::kRunning;
  ContentId content_id{};
  bool of_our_version = true;  // otherwise nothing but its state is known
  bool held_before = true;     // as note_hold() has said
  // Its memory was given up, or was about to be, and not copied: if it has no peer, the tool that
  // did that was killed.
  bool half_way = false;
  // It shares memory with other processes, and has given up what it had of theirs (kDetach).
  bool shares = false;
  bool detached = false;
  // Of managed memory that it can give up.
  std::uint64_t managed_areas = 0;
  // A tool is at work on it.
  bool has_peer = false;
  // Where it comes from; of another version's, with the program.
  AgentOrigin origin = AgentOrigin::kStarted;

  // Its memory is away, and no tool is at work on it: if the driver lets it run, it stands still.
  bool waits() const;
  // Nothing of it comes back by itself: only a tool finds content in an image, or sees what others
  // still miss of memory that is shared, and an agent whose process the driver holds waits for
  // that.
  bool needs_tool() const;
  // "stands still until ...", for people. `root`: with which `stasis recover` brings it back.
  std::string until_when(Pid root) const;
};

// Is the content of device memory, or may it be, in the program's own memory?
bool is_away(AgentState state);

// What the agent in a process says of itself. Nothing if there is no agent. kNotPermitted; kTimeout
// if that is not known by `until`.
Result<std::optional<ProbedAgent>> probe_agent(Pid pid,
                                               Clock::time_point until = Clock::time_point::max());

// Whether a program that is no tool holds the lock of the agent's page, which no wait ends.
bool is_held_by_no_tool(Pid pid);

// An agent's page says that the process has memory of another process's, or a multicast object,
// also if the agent does not answer, or not yet, or cannot be reached. The driver would lose the
// process.
bool says_it_shares(Pid pid);

// On how many sockets the agent has ever listened for those that want memory of the process's; 0
// if there is no agent, or it cannot be seen.
std::uint32_t services_of(Pid pid);

// Whether there is an agent, and no way to it: its program has closed the descriptor of its page.
bool is_out_of_reach(Pid pid);

// Writes down, for those who look later, that the driver is about to hold the process. Where
// there is no agent, or it cannot be reached, nothing.
void note_hold(Pid pid, const Pidfd& pidfd);

}  // namespace stasis::direct
