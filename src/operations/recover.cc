#include <fmt/format.h>

#include "checkpoint/suspended.h"
#include "operations/common.h"

namespace stasis {

using namespace operations;

namespace {

// Brings one target of a record back. Nothing if the process has ended meanwhile.
Result<std::optional<ProcessReport>> recover_target(Driver& driver, const JournalTarget& target) {
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
  auto state = process->cuda_state();
  if (!state) return fail(std::move(state.error()));
  // A record of a restore has no start times yet: a number that another program got has no CUDA
  // state, or one that nobody froze.
  if (!*state) return std::optional<ProcessReport>();
  if (**state != target.initial) {
    if (auto done = process->bring_to(target.initial, std::chrono::seconds(30)); !done) {
      return fail(std::move(done.error()));
    }
  }
  if (target.initial == CudaState::kRunning) forget_suspended(*process);
  return ProcessReport{target.pid, process->info().comm, target.initial, 0};
}

RecoverReport recover_record(Driver& driver, const JournalRecord& record) {
  RecoverReport report;
  report.root = record.root;
  report.operation = record.operation;
  report.image = record.image;
  auto journal = Journal::adopt(record);
  if (!journal) {
    report.error = std::move(journal.error());
    return report;
  }
  for (const JournalTarget& target : record.targets) {
    auto done = recover_target(driver, target);
    // One that cannot be brought back is no reason to leave the others.
    if (!done) {
      report.error = std::move(done.error());
    } else if (*done) {
      report.processes.push_back(std::move(**done));
    }
  }
  if (!report.error) journal->finish();
  return report;
}

}  // namespace

Result<RecoverReport> recover(const Environment& env, Pid root) {
  auto entries = read_journal();
  if (!entries) return fail(std::move(entries.error()));
  std::string operation;
  for (const JournalEntry& entry : *entries) {
    if (entry.record.root != root) continue;
    if (entry.under_way) {
      return fail(ErrorCode::kBusy,
                  fmt::format("`stasis {}` (process {}) is working on process {}",
                              entry.record.operation, entry.record.owner.value, root.value),
                  "wait for it to end, or interrupt it");
    }
    operation = entry.record.operation;
  }
  // Everything in the tree that is not running, whoever left it so.
  auto report = resume(env, root, {});
  if (!report) return fail(std::move(report.error()));
  return RecoverReport{root, operation, {}, std::move(report->processes), std::nullopt};
}

Result<std::vector<RecoverReport>> recover_all(const Environment& env) {
  auto entries = read_journal();
  if (!entries) return fail(std::move(entries.error()));
  std::vector<RecoverReport> out;
  for (const JournalEntry& entry : *entries) {
    if (entry.under_way) continue;
    out.push_back(recover_record(env.driver, entry.record));
  }
  return out;
}

}  // namespace stasis
