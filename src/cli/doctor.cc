#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "base/trace.h"
#include "checkpoint/group.h"
#include "cli/target.h"
#include "cli/verbs.h"
#include "doctor/machine.h"
#include "doctor/processes.h"

namespace stasis::cli {
namespace {

struct Options {
  Target target;
  MachineOptions machine;
  CriuOptions criu;
};

nlohmann::json obstacles_json(const std::vector<Obstacle>& obstacles) {
  nlohmann::json out = nlohmann::json::array();
  for (const Obstacle& obstacle : obstacles) {
    out.push_back({{"id", obstacle.id.name()},
                   {"light", severity_name(obstacle.severity)},
                   {"what", obstacle.what},
                   {"remedy", obstacle.remedy}});
  }
  return out;
}

void print(Context& context, const std::string& heading, const std::vector<Obstacle>& obstacles) {
  context.terminal.out(heading);
  for (const Obstacle& obstacle : obstacles) {
    context.terminal.out(
        fmt::format("  {:<7} {}", severity_name(obstacle.severity), obstacle.what));
    if (!obstacle.remedy.empty())
      context.terminal.out(fmt::format("          what to do: {}", obstacle.remedy));
  }
}

Result<std::vector<Obstacle>> examine_tree(Driver& driver, const Options& options) {
  const Span span(TraceKind::kPhase, "processes");
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(auto group, Group::open(driver, options.target.pid));
  group.dismiss();
  // Its standard streams are connected again wherever it is restored.
  const auto& job = options.target.job;
  const bool whole_job = job && options.target.pid == job->root;
  return examine_processes(driver, procfs, group, options.criu,
                           whole_job ? job->streams : std::vector<std::string>());
}

Result<int> run(Context& context, Options& options) {
  STASIS_TRY(reach(context, options.target));
  const auto driver = context.load_driver(Context::Movers::kNone);
  Span span(TraceKind::kPhase, "machine");
  const std::vector<Obstacle> machine = examine_machine(driver, options.machine, context.interrupt);
  span.end();
  STASIS_TRY(context.interrupt.check());
  std::vector<Obstacle> tree;
  if (options.target.pid.value != 0 && driver) {
    STASIS_TRY_ASSIGN(auto found, examine_tree(**driver, options));
    tree = std::move(found);
  }
  const Severity severity = std::max(worst(machine), worst(tree));
  const int status = severity == Severity::kRed ? 1 : 0;
  if (context.json) {
    context.print({{"ok", severity != Severity::kRed},
                   {"light", severity_name(severity)},
                   {"machine", obstacles_json(machine)},
                   {"processes", obstacles_json(tree)}});
    return status;
  }
  print(context, "This machine", machine);
  if (!tree.empty())
    print(context, fmt::format("Process {} and what is below it", options.target.pid.value), tree);
  return status;
}

}  // namespace

Verb add_doctor(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "doctor",
      "say whether this machine, and a process tree, can be checkpointed, and why not; "
      "exit status 1 if something is red");
  add_target(*command, options->target)->required(false);
  command
      ->add_option("-D,--images-dir", options->machine.images_dir,
                   "also look at the disk of this directory")
      ->option_text("DIR");
  command->add_flag("!--no-trial", options->machine.trial,
                    "do not suspend and resume a process of our own on each GPU");
  add_criu_path(*command, options->machine.criu_path);
  return {command, [options](Context& context) { return run(context, *options); }, true, true, true,
          false};
}

}  // namespace stasis::cli
