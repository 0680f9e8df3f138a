#include "direct/stillness.h"

#include <utility>

#include <fmt/format.h>

#include "abi/agent_thread.h"
#include "base/trace.h"
#include "proc/parking.h"
#include "proc/procfs.h"

namespace stasis {

Result<void> note_driver_threads(const AgentSet& agents,
                                 const std::vector<const Process*>& processes,
                                 DriverThreads& threads) {
  for (const direct::AgentClient& agent : agents) {
    if (agent.managed_areas() == 0 || threads.contains(agent.pid())) continue;
    for (const Process* process : processes) {
      if (process->pid() != agent.pid() || !process->alive()) continue;
      STASIS_TRY_ASSIGN(threads[agent.pid()], process->restore_thread_id());
    }
  }
  return {};
}

Result<void> Stillness::keep(const direct::AgentClient& agent, const DriverThreads& threads) {
  if (agent.managed_areas() == 0) return {};
  const Pid pid = agent.pid();
  const Span span(TraceKind::kDriver, "keep threads still", pid);
  const auto drivers = threads.find(pid);
  if (drivers == threads.end()) {
    return fail(ErrorCode::kInternal,
                fmt::format("process {} has managed memory, and the driver's thread in it is not "
                            "known",
                            pid.value));
  }
  std::vector<Tid> spared{drivers->second};
  const proc::ProcFs procfs;
  for (const Tid thread : procfs.threads(pid)) {
    const auto known = procfs.thread(pid, thread);
    if (known && known->comm == kAgentThread) spared.push_back(thread);
  }
  STASIS_TRY(park_threads(pid, spared));
  kept_.push_back(pid);
  return {};
}

Result<void> Stillness::end() {
  Result<void> first;
  for (const Pid pid : std::exchange(kept_, {})) {
    auto done = unpark_threads(pid);
    if (!done && done.error().code != ErrorCode::kProcessGone && first) first = std::move(done);
  }
  return first;
}

}  // namespace stasis
