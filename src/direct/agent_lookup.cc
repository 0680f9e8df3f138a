#include "direct/agent_lookup.h"

#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include "abi/activation.h"
#include "attach/libraries.h"
#include "direct/agent_set.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

using direct::Activation;
using direct::AgentClient;

constexpr const char* kLibrary = "libstasis-preload.so";

bool maps(Pid pid, const std::string& name) {
  const auto found = proc::ProcFs().maps_file(pid, name);
  return found && *found;
}

// Its own: a child that was forked inherits its parent's descriptor and not the mapping.
bool has_page(Pid pid) { return maps(pid, fmt::format("memfd:{}", direct::kAgentMemfd)); }

std::optional<Activation> read_activation(Pid pid) {
  const auto space = proc::AddressSpace::open(pid);
  const auto mappings = proc::ProcFs().mappings(pid);
  if (!space || !mappings) return std::nullopt;
  const auto found = attach::find_libraries(
      *space, *mappings, [](std::string_view name) { return name.starts_with(kLibrary); });
  if (!found || found->empty()) return std::nullopt;
  return found->front().image().value<Activation>(direct::kActivationName);
}

bool is_switched_off(Pid pid) {
  const auto variables = proc::ProcFs().environment(pid);
  return variables &&
         std::find(variables->begin(), variables->end(), "STASIS_AGENT=off") != variables->end();
}

}  // namespace

Result<std::optional<AgentClient>> find_begun_agent(const Environment& env, const Process& process,
                                                    Clock::time_point deadline) {
  constexpr std::chrono::milliseconds kPoll{20};
  for (Waiting waiting(env.progress);; waiting.tell()) {
    auto agent = find_agent(env, process, true);
    if (!agent || *agent || !process.alive()) return agent;
    const Pid pid = process.pid();
    if (Clock::now() >= deadline || !has_page(pid) || direct::is_out_of_reach(pid)) return agent;
    STASIS_TRY(env.interrupt.check());
    std::this_thread::sleep_for(kPoll);
  }
}

AgentLibrary agent_library(Pid pid) {
  if (!maps(pid, kLibrary)) return AgentLibrary::kNone;
  switch (read_activation(pid).value_or(Activation::kUndecided)) {
    case Activation::kWorks:
      return AgentLibrary::kWorks;
    case Activation::kOff:
      return AgentLibrary::kOff;
    case Activation::kOwnTool:
    case Activation::kCudaTool:
      return AgentLibrary::kTool;
    case Activation::kUndecided:
      break;
  }
  return is_switched_off(pid) ? AgentLibrary::kOff : AgentLibrary::kWorks;
}

std::string why_inactive(AgentLibrary library) {
  switch (library) {
    case AgentLibrary::kOff:
      return "has the agent's library, and STASIS_AGENT=off in its environment";
    case AgentLibrary::kTool:
      return "has the agent's library, which keeps out of the way of a CUDA tool that is at work "
             "in "
             "it (CUPTI, Nsight, compute-sanitizer, cuda-gdb)";
    case AgentLibrary::kNone:
    case AgentLibrary::kWorks:
      break;
  }
  return {};
}

std::optional<std::string> why_no_agent(const Process& process) {
  const std::string who = fmt::format("process {}", process.pid().value);
  if (has_page(process.pid())) {
    return direct::is_out_of_reach(process.pid())
               ? who + " has an agent, and has closed the descriptor by which it is reached"
               : who + " has an agent that has not begun to listen";
  }
  const AgentLibrary library = agent_library(process.pid());
  if (library == AgentLibrary::kNone) return std::nullopt;
  if (library != AgentLibrary::kWorks) return who + " " + why_inactive(library);
  return who +
         " has the agent's library and no agent: it has allocated no GPU memory by it, or lacked a "
         "thread or a descriptor for it";
}

Result<void> refuse_lost_agent(const Process& process) {
  if (!direct::says_it_shares(process.pid())) return {};
  const auto why = why_no_agent(process);
  return fail(refusal(
      {"lost-agent", Severity::kRed, process.pid(),
       fmt::format("{}, and GPU memory that it shares with other processes (NCCL, CUDA IPC); "
                   "the driver cannot restore that (the job would be lost)",
                   why ? *why : fmt::format("process {} has no agent", process.pid().value)),
       "if its agent has only just begun, try again; a program that closes descriptors which "
       "it did not open must leave the agent's open"}));
}

bool has_agent(const Process& process) {
  return has_page(process.pid()) || maps(process.pid(), kLibrary);
}

std::string list_of(const std::vector<const Process*>& processes) {
  std::string list = processes.size() == 1 ? "process" : "processes";
  const char* before = " ";
  for (const Process* process : processes) {
    list += fmt::format("{}{} ({})", before, process->pid().value, process->info().comm);
    before = ", ";
  }
  return list;
}

}  // namespace stasis
