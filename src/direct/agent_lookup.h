// Why the tool cannot ask a process through its agent although it has the agent, or its library:
// the tool tells that when the driver moves the memory instead. Private to src/direct.
// Thread-safe.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/process.h"
#include "direct/agent_client.h"
#include "direct/environment.h"

namespace stasis {

// As AgentClient::find(), and waits until `deadline` for an agent whose page is there already and
// whose thread has not run yet: a busy machine lets a new thread wait. kInterrupted.
Result<std::optional<direct::AgentClient>> find_begun_agent(const Environment& env,
                                                            const Process& process,
                                                            Clock::time_point deadline);

// What the agent's library has to say in a process in which no agent was found: it begins to talk
// with the first memory that it serves, or that the program imports.
enum class AgentLibrary {
  kNone,   // it was started without it
  kWorks,  // it serves what the program allocates; or no call of the driver's has come by yet
  kOff,    // by STASIS_AGENT=off
  kTool,   // it keeps out of the way of a tool of CUDA's, or the program is one of Stasis's own
};
AgentLibrary agent_library(Pid pid);
// For kOff and kTool, what the process has, as a half-sentence; "" for the others.
std::string why_inactive(AgentLibrary library);

// The reason, for a process in which no agent was found. Nothing: it was started without one.
std::optional<std::string> why_no_agent(const Process& process);
// kNotSupported: no agent was found in the process, and the driver would lose it, as the agent's
// page says (direct::says_it_shares()).
Result<void> refuse_lost_agent(const Process& process);
// Whether it has the agent, or at least its library.
bool has_agent(const Process& process);

// "process 12 (python)", "processes 12 (python), 13 (python)".
std::string list_of(const std::vector<const Process*>& processes);

}  // namespace stasis
