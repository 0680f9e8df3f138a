#include "direct/stillness.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "base/trace.h"
#include "proc/parking.h"
#include "proc/procfs.h"

namespace stasis {

namespace {

// How long an agent may take for memory that it copies by itself.
std::chrono::milliseconds replacing_time(const direct::AgentClient& agent) {
  // The page is the target's to write.
  constexpr std::uint64_t kMost = std::uint64_t{256} << 30;
  const std::uint64_t managed = std::min(agent.managed_areas() * direct::kManagedArea, kMost);
  return kMapping + direct::copy_time(managed);
}

// Each by itself: CRIU may fail when it has taken a part of the tree.
bool is_held_by_us(Pid pid) {
  const auto details = proc::ProcFs().details(pid);
  return details && details->tracer == ::getpid();
}

}  // namespace

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
  const Pid pid = agent.pid();
  if (agent.managed_areas() == 0 || is_held_by_us(pid)) return {};
  const Span span(TraceKind::kDriver, "park threads", pid);
  const auto drivers = threads.find(pid);
  if (drivers == threads.end()) {
    return fail(ErrorCode::kInternal,
                fmt::format("process {} has managed memory, and the driver's thread in it is not "
                            "known",
                            pid.value));
  }
  auto spared = agents_threads(pid);
  spared.push_back(drivers->second);
  STASIS_TRY(park_threads(pid, spared));
  kept_.push_back(pid);
  return mark_memory_in_work(*agent.address_space(), true);
}

Result<void> finish_stillness(const Environment& env, const Process& process) {
  // To look for parked threads takes its time in a process of very many mappings.
  const auto seen = direct::probe_agent(process.pid());
  if (!seen || !*seen || (*seen)->managed_areas == 0) return {};
  const auto space = proc::AddressSpace::open(process.pid());
  if (!space) return {};
  const auto in_work = is_memory_in_work(*space);
  if (!in_work || !*in_work) return {};
  STASIS_TRY_ASSIGN(auto agent, find_agent(env, process, false));
  // It serves one request after the other.
  if (agent) STASIS_TRY(agent->ask(direct::AgentCommand::kNone, 0, replacing_time(*agent)));
  return mark_memory_in_work(*space, false);
}

Result<void> Stillness::finish(direct::AgentClient& agent) {
  auto done = agent.finish(replacing_time(agent));
  if (done || agent.managed_areas() == 0 || agent.has_answered() || !agent.pidfd().alive())
    return done;
  std::erase(kept_, agent.pid());
  Error why = std::move(done.error());
  why.remedy = fmt::format("`stasis recover {}` when it is done", agent.pid().value);
  return fail(std::move(why));
}

Result<void> Stillness::end() {
  Result<void> first;
  for (const Pid pid : std::exchange(kept_, {})) {
    const auto space = proc::AddressSpace::open(pid);
    if (space) (void)mark_memory_in_work(*space, false);
    auto done = unpark_threads(pid);
    if (!done && done.error().code != ErrorCode::kProcessGone && first) first = std::move(done);
  }
  return first;
}

}  // namespace stasis
