#include <algorithm>

#include <fmt/format.h>

#include "checkpoint/stopped.h"
#include "checkpoint/suspended.h"
#include "operations/common.h"

namespace stasis {

namespace {

// Restores the GPU state of a process, which a restore that was killed may have brought to another
// machine than the one it was on.
Result<void> restore_state(Driver& driver, Process& process) {
  std::vector<GpuPair> pairs;
  if (auto memory = recall_suspended(process); memory && !memory->gpus.empty()) {
    auto gpus = driver.gpus();
    if (!gpus) return fail(std::move(gpus.error()));
    auto planned = plan_gpu_map(driver, {}, memory->gpus, *gpus);
    if (!planned) return fail(std::move(planned.error()));
    pairs = std::move(*planned);
  }
  return process.restore(pairs);
}

// Brings one target of a record back. Nothing if the process has ended meanwhile. `stopped_by_us`:
// if a stop signal holds it, it was the operation's.
Result<std::optional<ProcessReport>> recover_target(Driver& driver, const JournalTarget& target,
                                                    bool stopped_by_us) {
  auto process = Process::open(driver, target.pid);
  if (!process) {
    const ErrorCode code = process.error().code;
    if (code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie ||
        code == ErrorCode::kThreadId) {
      return std::optional<ProcessReport>();
    }
    return fail(std::move(process.error()));
  }
  const bool same = target.start_ticks == 0 || target.start_ticks == process->info().start_ticks;
  if (!same) return std::optional<ProcessReport>();
  // CRIU outlives a killed `stasis dump` until it sees that nobody answers it any more.
  const auto details = proc::ProcFs().details(target.pid);
  if (details && details->tracer != 0) {
    return fail(ErrorCode::kBusy,
                fmt::format("process {} is being traced by process {} (CRIU, or a debugger)",
                            target.pid.value, details->tracer),
                "wait for it to end, then recover again");
  }
  if (stopped_by_us && process->info().state == 'T') {
    auto done = bring_stopped_to(*process, target.initial);
    if (!done && !process->alive()) return std::optional<ProcessReport>();
    if (!done) return fail(std::move(done.error()));
    return report_process(*process, true, 0);
  }
  auto state = process->cuda_state();
  if (!state) return fail(std::move(state.error()));
  // A record of a restore has no start times yet: a number that another program got has no CUDA
  // state, or one that nobody froze.
  if (!*state) return std::optional<ProcessReport>();
  Result<void> done;
  if (**state == CudaState::kCheckpointed && target.initial != CudaState::kCheckpointed) {
    done = restore_state(driver, *process);
    // Somebody was quicker, such as a call that a killed tool has left: bring_to() sees to the
    // rest.
    if (!done && done.error().code == ErrorCode::kWrongState) done = {};
  }
  if (done) done = process->bring_to(target.initial, std::chrono::seconds(30));
  // CRIU ends what it was restoring when it sees that nobody answers it any more.
  if (!done && !process->alive()) return std::optional<ProcessReport>();
  if (!done) return fail(std::move(done.error()));
  if (target.initial == CudaState::kRunning) forget_suspended(*process);
  return report_process(*process, true, 0);
}

// Nothing if somebody else has recovered it meanwhile.
std::optional<RecoverReport> recover_record(const Environment& env, const JournalEntry& seen) {
  RecoverReport report;
  report.root = seen.record.root;
  report.operation = seen.record.operation;
  report.image = seen.record.image;
  auto journal = Journal::adopt(seen.record.root);
  if (!journal) {
    report.error = std::move(journal.error());
    return report;
  }
  if (!*journal) return std::nullopt;
  const std::vector<JournalTarget> targets = (*journal)->record().targets;
  // An operation on another root may have one of them by now.
  if (auto alone = (*journal)->update(targets); !alone) {
    report.error = std::move(alone.error());
    return report;
  }
  settle(env.driver, targets);
  for (const JournalTarget& target : targets) {
    if (auto stop = env.interrupt.check(); !stop) {
      report.error = std::move(stop.error());
      break;
    }
    auto done = recover_target(env.driver, target, seen.record.operation == "criu dump");
    // One that cannot be brought back is no reason to leave the others.
    if (!done) {
      report.error = std::move(done.error());
    } else if (*done) {
      report.processes.push_back(std::move(**done));
    }
  }
  if (!report.error) (*journal)->finish();
  return report;
}

}  // namespace

Result<RecoverReport> recover(const Environment& env, Pid root) {
  auto entries = read_journal();
  if (!entries) return fail(std::move(entries.error()));
  RecoverReport out;
  out.root = root;
  for (const JournalEntry& entry : *entries) {
    if (entry.record.root != root) continue;
    if (entry.under_way) {
      return fail(
          ErrorCode::kBusy,
          fmt::format("`{}` (process {}) is working on process {}",
                      operation_name(entry.record.operation), entry.record.owner.value, root.value),
          "wait for it to end, or interrupt it");
    }
    // What was cut short comes first: it knows processes that are not in the tree any more, and
    // that CRIU may still hold one.
    if (auto report = recover_record(env, entry)) out = std::move(*report);
    if (out.error) return fail(std::move(*out.error));
  }
  // Then everything in the tree that is not running, whoever left it so.
  auto report = resume(env, root, {});
  if (!report) {
    // With a record, a target that has ended meanwhile is an answer and no failure.
    const ErrorCode code = report.error().code;
    const bool nobody = code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie ||
                        code == ErrorCode::kThreadId || code == ErrorCode::kNotCuda;
    if (nobody && !out.operation.empty()) return out;
    return fail(std::move(report.error()));
  }
  for (const ProcessReport& before : out.processes) {
    const bool in_tree =
        std::any_of(report->processes.begin(), report->processes.end(),
                    [&](const ProcessReport& now) { return now.pid == before.pid; });
    if (!in_tree) report->processes.push_back(before);
  }
  out.processes = std::move(report->processes);
  return out;
}

Result<std::vector<RecoverReport>> recover_all(const Environment& env) {
  auto entries = read_journal();
  if (!entries) return fail(std::move(entries.error()));
  std::vector<RecoverReport> out;
  for (const JournalEntry& entry : *entries) {
    if (entry.under_way) continue;
    if (auto report = recover_record(env, entry)) out.push_back(std::move(*report));
  }
  return out;
}

}  // namespace stasis
