#include "operations/rollback.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/phases.h"
#include "base/scope_guard.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_probe.h"
#include "direct/driver_room.h"
#include "direct/held_neighbours.h"
#include "driver/gpu_plan.h"

namespace stasis {

Result<void> restore_state(const Environment& env, Process& process) {
  std::vector<GpuPair> pairs;
  const auto memory = recall_suspended(process);
  if (memory && !memory->gpus.empty()) {
    STASIS_TRY_ASSIGN(auto gpus, env.driver.gpus());
    STASIS_TRY_ASSIGN(pairs, plan_gpu_map(env.driver, {}, memory->gpus, gpus));
  }
  const Pid pid = process.pid();
  const auto room = direct::find_driver_room(
      env.driver, std::span(&pid, 1), memory ? memory->uses : std::vector<GpuUse>(), pairs,
      {env.interrupt, [&env](auto text) { env.tell(text); }, std::chrono::minutes(2)});
  if (room) {
    const auto neighbours = HeldNeighbours::hold_if_possible(
        env, {process.info()}, targets_of(memory ? memory->uses : std::vector<GpuUse>(), pairs),
        kNeighbourTime);
    return process.restore(pairs);
  }
  Error why = room.error();
  if (why.code == ErrorCode::kOutOfGpuMemory)
    why.remedy = fmt::format(
        "process {0} stays suspended: free GPU memory, then run `stasis "
        "recover {0}` again",
        pid.value);
  return fail(std::move(why));
}

Result<void> roll_back_tree(const Environment& env, ProcessTree& tree) {
  std::vector<Pid> processes;
  std::vector<GpuUse> needed;
  for (const TreeMember& member : tree.members()) {
    if (!member.initial || *member.initial == CudaState::kCheckpointed) continue;
    const auto state = member.process.cuda_state();
    if (!state || *state != CudaState::kCheckpointed) continue;
    std::vector<GpuUse> uses = tree.gpu_use_of(member.process.pid());
    // An operation before may have left it so.
    if (auto memory = uses.empty() ? recall_suspended(member.process) : std::nullopt)
      uses = std::move(memory->uses);
    processes.push_back(member.process.pid());
    needed.insert(needed.end(), uses.begin(), uses.end());
  }
  // The user's interrupt has led here, or comes too late.
  const Interrupt never;
  auto room = direct::find_driver_room(
      env.driver, processes, needed, {},
      {never, [&env](auto text) { env.tell(text); }, std::chrono::seconds(30)});
  // The processes stand still: what is free decides then, without the lock.
  if (!room && room.error().code == ErrorCode::kTimeout) {
    const auto gpus = env.driver.gpus();
    if (auto fits = gpus ? check_gpu_memory(needed, {}, *gpus) : Result<void>(); !fits)
      room = fail(std::move(fits.error()));
  }
  if (room || room.error().code != ErrorCode::kOutOfGpuMemory) {
    const auto neighbours = processes.empty()
                                ? HeldNeighbours()
                                : HeldNeighbours::hold_if_possible(
                                      env, tree.infos(), targets_of(needed, {}), kNeighbourTime);
    return tree.roll_back();
  }
  tree.dismiss();
  remember_suspended(tree);
  return fail(
      ErrorCode::kNotRolledBack,
      fmt::format("process {} stays suspended: {}", processes.front().value, room.error().message),
      fmt::format("free GPU memory, then run `stasis recover {}`", tree.root().value));
}

Error roll_back(const Environment& env, OpenedTree& opened, Error why, const std::string& stays) {
  CurrentPhase::set(kRollBackPhase);
  const ScopeGuard end_phase([] { CurrentPhase::set({}); });
  opened.direct.wait_for_copy(why);
  return rolled_back(env, opened, std::move(why), roll_back_tree(env, opened.tree), stays);
}

Error rolled_back(const Environment& env, OpenedTree& opened, Error why, Result<void> back,
                  const std::string& stays) {
  // Where the driver still holds a process, its agent waits for `stasis recover`: asked now, it
  // would hang in the driver.
  if (back) {
    opened.direct.take_held(env, opened.tree);
    back = opened.direct.roll_back();
    // Which is why the rest went wrong.
    if (auto gone = opened.direct.take_gone()) why = std::move(*gone);
  } else {
    opened.direct.dismiss();
  }
  // An agent has not brought its program back, and says no more what it does.
  if (back && why.code == ErrorCode::kNotRolledBack) return why;
  if (back) {
    opened.journal->finish();
    // A criu that was killed while its code ran in a process takes that along, in an instant.
    if (why.code == ErrorCode::kCriuFailed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::string ended;
    for (const TreeMember& member : opened.tree.members()) {
      // Workers and helpers come and go.
      if (!member.initial && member.process.pid() != opened.tree.root()) continue;
      if (!member.process.pidfd().wait_exit(0)) continue;
      ended += fmt::format("{}{} ({})", ended.empty() ? "" : ", ", member.process.pid().value,
                           member.process.info().comm);
    }
    if (why.code == ErrorCode::kNoSuchProcess && !ended.empty()) why.code = ErrorCode::kProcessGone;
    // One that has become another program by exec lives, and is not as it was.
    const bool gone = why.code == ErrorCode::kProcessGone;
    std::string rest =
        gone ? "rolled back: all else is as it was" : "rolled back: every process is as it was";
    if (!stays.empty()) rest = gone ? "all else runs on" : "every program runs on";
    if (!ended.empty()) rest = "rolled back, but ended meanwhile: process " + ended;
    return std::move(why).within(stays.empty() ? rest : rest + "; " + stays);
  }
  Error both = std::move(back.error());
  both.message = fmt::format("{}; and then {}", why.message, both.message);
  if (!why.remedy.empty()) both.remedy += "; the first failure: " + why.remedy;
  both.driver = why.driver;
  return both;
}

Error stands_still(Error why, Pid root, bool tries_by_itself) {
  if (tries_by_itself && why.code == ErrorCode::kOutOfGpuMemory) {
    return std::move(why).within(
        "the program waits for its GPU memory, and goes on by itself as soon as there is room for "
        "it");
  }
  if (why.code == ErrorCode::kProcessGone) return why;
  const bool damaged = why.code == ErrorCode::kImageCorrupt;
  why.code = ErrorCode::kNotRolledBack;
  if (damaged) {
    // Nothing of ours brings that back.
    why.remedy = fmt::format(
        "end the program with `kill -9 {0}` and restore from another image; or put the damaged "
        "files back in their place, whole: the program stands still until `stasis recover {0}` "
        "then",
        root.value);
    return std::move(why).within("while its GPU memory was brought back");
  }
  why.remedy += fmt::format("{}the program stands still until `stasis recover {}`",
                            why.remedy.empty() ? "" : "; ", root.value);
  return std::move(why).within("while its GPU memory was brought back");
}

bool try_by_themselves(const std::vector<const Process*>& processes) {
  return std::none_of(processes.begin(), processes.end(), [](const Process* process) {
    const auto agent = direct::probe_agent(process->pid());
    return agent && *agent && (*agent)->needs_tool();
  });
}

ProcessReport report_process(const Process& process, bool cuda, std::uint64_t gpu_bytes) {
  ProcessReport report{process.pid(), process.info().comm, cuda, std::nullopt, gpu_bytes};
  if (cuda && process.alive()) {
    if (auto state = process.cuda_state()) report.state = *state;
  }
  return report;
}

std::vector<ProcessReport> report_processes(const ProcessTree& tree) {
  std::vector<ProcessReport> out;
  for (const TreeMember& member : tree.members()) {
    const std::uint64_t bytes = total_bytes(tree.gpu_use_of(member.process.pid()));
    out.push_back(report_process(member.process, member.initial.has_value(), bytes));
  }
  return out;
}

}  // namespace stasis
