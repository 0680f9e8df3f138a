#include <iterator>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "base/phases.h"
#include "base/scope_guard.h"
#include "checkpoint/journal.h"
#include "cli/swap.h"
#include "cli/target.h"
#include "cli/ticker.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

std::string to_text(const RecoverReport& report) {
  const std::string what = report.operation == Operation::kNone
                               ? ""
                               : fmt::format(" (cut short: {})", command_name(report.operation));
  if (!report.outcome.empty()) return fmt::format("swap (cut short): {}", report.outcome);
  if (report.finished) {
    return fmt::format(
        "process {}{}: the dump was past the point of no return and is finished now: the image {} "
        "is complete, and the process has ended",
        report.root.value, what, report.image);
  }
  if (report.as_before) {
    return fmt::format("process {}{}: suspended as before", report.root.value, what);
  }
  if (report.error && report.processes.empty()) {
    return fmt::format("process {}{}: not recovered", report.root.value, what);
  }
  if (report.processes.empty()) {
    return fmt::format(
        "process {}{}: none of its CUDA processes lives any more{}", report.root.value, what,
        report.image.empty() ? ""
                             : fmt::format("; if its image is complete, `stasis restore "
                                           "--images-dir {}` brings it back",
                                           report.image));
  }
  if (report.was_so) return subject_text(report.root, report.processes) + " was running already";
  const bool is_root = report.processes.size() == 1 && report.processes.front().pid == report.root;
  std::string states;
  for (const ProcessReport& process : report.processes) {
    if (!process.state) continue;
    states += is_root ? fmt::format(" is {}", cuda_state_name(*process.state))
                      : fmt::format("{} {} is {}", states.empty() ? ":" : ",", process.pid.value,
                                    cuda_state_name(*process.state));
  }
  return fmt::format(
      "process {}{}{}{}", report.root.value, what, states,
      report.image_kept ? fmt::format("; the image {} is complete and is kept", report.image) : "");
}

std::string to_text(const CutShortElsewhere& other) {
  const std::string what =
      fmt::format("`{}` was cut short in another PID namespace", command_name(other.operation));
  if (other.seen.value == 0)
    return what + ", which is not seen from here: run `stasis recover --all` there";
  return fmt::format("{}, that of process {}: run `stasis recover --all` in that container", what,
                     other.seen.value);
}

struct RecoverArguments {
  Target target;
  bool all = false;
  std::chrono::milliseconds limit{0};
};

Result<int> run_recover(Context& context, RecoverArguments& options) {
  if (!options.all && options.target.text.empty()) {
    return fail(ErrorCode::kUsage, "no process is named", "give a PID, or --all");
  }
  STASIS_TRY(reach(context, options.target));
  context.interrupt.set_time_limit(options.limit);
  context.interrupt.go_on_without_memory();
  std::vector<RecoverReport> reports;
  // Before the driver is loaded, which starts threads.
  if (options.all) reports = job::recover_swaps(swap_caller(context));
  STASIS_TRY_ASSIGN(auto driver, context.load_driver(Context::Movers::kOne));
  std::optional<Ticker> ticker;
  ticker.emplace(context.terminal, context.interrupt);
  CurrentPhase::set("recover");
  const ScopeGuard end_phase([] { CurrentPhase::set({}); });
  if (options.all) {
    STASIS_TRY_ASSIGN(auto all, recover_all(context.environment(*driver)));
    std::move(all.begin(), all.end(), std::back_inserter(reports));
  } else {
    STASIS_TRY_ASSIGN(auto one, recover(context.environment(*driver), options.target.pid));
    reports.push_back(std::move(one));
  }
  ticker.reset();
  int status = 0;
  bool interrupted = false;
  for (const RecoverReport& report : reports) {
    if (!context.json) context.terminal.out(to_text(report));
    if (!report.error) continue;
    const bool stopped = report.error->code == ErrorCode::kInterrupted;
    interrupted = interrupted || stopped;
    if (!stopped && !report.as_before)
      status = exit_status(ErrorCode::kNotRolledBack);
    else if (!stopped && status == 0)
      status = exit_status(report.error->code);
    if (!context.json) context.terminal.error(*report.error);
  }
  if (status == 0 && interrupted) status = 128 + context.interrupt.signal_number();
  if (context.json) {
    context.print(to_json(reports));
  } else if (reports.empty()) {
    context.terminal.out("nothing to recover: no operation was cut short");
  }
  if (options.all) {
    for (const CutShortElsewhere& other : cut_short_elsewhere())
      context.terminal.note(to_text(other));
  }
  return status;
}

}  // namespace

Verb add_recover(CLI::App& app) {
  auto options = std::make_shared<RecoverArguments>();
  CLI::App* command = app.add_subcommand(
      "recover", "make processes run again that an interrupted operation left suspended or locked");
  CLI::Option* pid = add_target(*command, options->target)->required(false);
  command->add_flag("--all", options->all, "the targets of every operation that was cut short")
      ->excludes(pid);
  add_time_limit(*command, options->limit, "no further process is begun with");
  return {command, [options](Context& context) { return run_recover(context, *options); }};
}

}  // namespace stasis::cli
