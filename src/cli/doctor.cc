#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "base/phases.h"
#include "base/scope_guard.h"
#include "base/trace.h"
#include "checkpoint/journal.h"
#include "checkpoint/process_tree.h"
#include "cli/help.h"
#include "cli/target.h"
#include "cli/ticker.h"
#include "cli/verbs.h"
#include "doctor/machine.h"
#include "doctor/processes.h"
#include "proc/procfs.h"

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
    out.push_back(
        {{"id", obstacle.id.name()},
         {"light", severity_name(obstacle.severity)},
         {"what", obstacle.what},
         {"remedy", obstacle.remedy.empty() ? nlohmann::json() : nlohmann::json(obstacle.remedy)}});
  }
  return out;
}

// What each verb would say, as far as it can be known beforehand.
struct Verdict {
  std::vector<const Obstacle*> suspend;
  std::vector<const Obstacle*> dump;
  std::vector<const Obstacle*> restore;
};

// What a suspend, which needs neither CRIU nor a disk, does without; of permissions what is red.
constexpr auto kOnlyForImages =
    std::to_array<ObstacleId>({"permissions", "criu", "criu-check", "criu-plugin", "kernel",
                               "clock", "disk", "seccomp", "shm"});

bool is_only_for_images(const Obstacle& obstacle) {
  return std::find(kOnlyForImages.begin(), kOnlyForImages.end(), obstacle.id) !=
         kOnlyForImages.end();
}

Verdict verdict_of(const std::vector<Obstacle>& machine, const std::vector<Obstacle>& tree) {
  Verdict out;
  for (const Obstacle& obstacle : machine) {
    if (obstacle.severity != Severity::kRed) continue;
    if (!is_only_for_images(obstacle)) out.suspend.push_back(&obstacle);
    out.dump.push_back(&obstacle);
    // A restore reads the disk, and needs no room on it.
    if (obstacle.id != ObstacleId("disk")) out.restore.push_back(&obstacle);
  }
  for (const Obstacle& obstacle : tree) {
    if (obstacle.severity != Severity::kRed) continue;
    const bool of_criu = obstacle.by == Override::kIgnoreUndumpable ||
                         obstacle.id == ObstacleId("gpu-files") ||
                         obstacle.id == ObstacleId("held-file");
    if (!of_criu) out.suspend.push_back(&obstacle);
    out.dump.push_back(&obstacle);
  }
  return out;
}

// As wide as the terminal; in one line where it is none, for programs that look for words.
constexpr std::size_t kNoTerminal = std::numeric_limits<std::size_t>::max();

// `before`: the first reason of the line above it, which is not said twice.
void print_verdict(Context& context, const std::string& verb,
                   const std::vector<const Obstacle*>& reasons,
                   const std::vector<const Obstacle*>& before = {}) {
  const std::size_t width = Terminal::columns().value_or(kNoTerminal);
  std::string text = verb + ": yes";
  if (!reasons.empty()) {
    const bool same = !before.empty() && before.front() == reasons.front();
    text = same ? fmt::format("{}: no, for the same reason", verb)
                : fmt::format("{}: no, because {}", verb, reasons.front()->what);
    if (reasons.size() > 1) text += fmt::format("; and {} more, below", reasons.size() - 1);
  }
  const std::size_t marked = verb.size() + (reasons.empty() ? 5 : 4);
  context.terminal.out_marked(wrap(text, width, 2, 0), marked,
                              reasons.empty() ? Terminal::Colour::kGreen : Terminal::Colour::kRed);
}

struct Section {
  std::string heading;
  const std::vector<Obstacle>& obstacles;
};

void print(Context& context, const std::vector<const Obstacle*>& shown) {
  constexpr std::size_t kIndent = 10;
  const std::size_t width = Terminal::columns().value_or(kNoTerminal);
  for (const Obstacle* obstacle : shown) {
    const std::string light(severity_name(obstacle->severity));
    const std::string text =
        fmt::format("  {:<7} {}", light, wrap(obstacle->what, width, kIndent, kIndent));
    context.terminal.out_marked(text, 2 + light.size(),
                                obstacle->severity == Severity::kRed ? Terminal::Colour::kRed
                                : obstacle->severity == Severity::kYellow
                                    ? Terminal::Colour::kYellow
                                    : Terminal::Colour::kGreen);
    if (obstacle->remedy.empty()) continue;
    context.terminal.out_block(std::string(kIndent, ' ') +
                               wrap("what to do: " + obstacle->remedy, width, kIndent, kIndent));
  }
}

// All that is red, then all that is yellow: what stops the user is not below what is worth reading.
// A heading stands again where its section goes on. Returns how many are left out, which are green.
std::size_t print(Context& context, const std::vector<Section>& sections) {
  const Section* under = nullptr;
  std::size_t left_out = 0;
  for (const Severity severity : {Severity::kRed, Severity::kYellow, Severity::kGreen}) {
    for (const Section& section : sections) {
      std::vector<const Obstacle*> shown;
      for (const Obstacle& obstacle : section.obstacles)
        if (obstacle.severity == severity) shown.push_back(&obstacle);
      if (severity == Severity::kGreen && context.verbose == 0) {
        left_out += shown.size();
        continue;
      }
      if (shown.empty()) continue;
      if (std::exchange(under, &section) != &section) context.terminal.out(section.heading);
      print(context, shown);
    }
  }
  return left_out;
}

nlohmann::json verdict_json(const Verdict& verdict) {
  const auto one = [](const std::vector<const Obstacle*>& reasons) -> nlohmann::json {
    nlohmann::json ids = nlohmann::json::array();
    for (const Obstacle* obstacle : reasons)
      ids.push_back(obstacle->id.name());
    return {{"possible", reasons.empty()}, {"because", ids}};
  };
  return {{"suspend", one(verdict.suspend)},
          {"dump", one(verdict.dump)},
          {"restore", one(verdict.restore)}};
}

// Another tool works on a process of the tree. Looked for before the driver is asked, which keeps
// its asker waiting while another tool's call goes on.
Result<std::optional<Obstacle>> find_busy(Pid root) {
  STASIS_TRY_ASSIGN(const auto infos, proc::ProcFs().tree(root));
  std::vector<JournalTarget> targets;
  for (const proc::ProcessInfo& info : infos)
    targets.emplace_back(info.id(), CudaState::kRunning);
  const auto free = check_not_busy(targets);
  if (free) return std::optional<Obstacle>();
  // What is wrong with the state directory is said of the machine.
  if (free.error().code != ErrorCode::kBusy) return std::optional<Obstacle>();
  return std::optional<Obstacle>(
      {"cuda-state", Severity::kRed, root, free.error().message, free.error().remedy});
}

Result<std::vector<Obstacle>> examine_tree(Driver& driver, const Options& options,
                                           const Interrupt& interrupt) {
  const Span span(TraceKind::kPhase, "processes");
  const proc::ProcFs procfs;
  // What the tree is like changes until the other tool has done.
  STASIS_TRY_ASSIGN(auto busy, find_busy(options.target.pid));
  if (busy) return std::vector<Obstacle>{std::move(*busy)};
  STASIS_TRY_ASSIGN(auto tree, ProcessTree::open(driver, options.target.pid));
  tree.dismiss();
  // Its standard streams are connected again wherever it is restored.
  const auto& job = options.target.job;
  const bool whole_job = job && options.target.pid == job->root;
  return examine_processes(driver, procfs, tree, options.criu, interrupt,
                           whole_job ? job->streams : std::vector<std::string>());
}

Result<int> run(Context& context, Options& options) {
  STASIS_TRY(reach(context, options.target));
  const auto driver = context.load_driver(Context::Movers::kNone);
  std::optional<Ticker> ticker;
  options.machine.on_forked = [&] {
    CurrentPhase::set(options.machine.trial ? "trial" : "machine");
    ticker.emplace(context.terminal, context.interrupt);
  };
  const ScopeGuard end_phase([] { CurrentPhase::set({}); });
  Span span(TraceKind::kPhase, "machine");
  const std::vector<Obstacle> machine = examine_machine(driver, options.machine, context.interrupt);
  span.end();
  STASIS_TRY(context.interrupt.check());
  std::vector<Obstacle> tree;
  if (options.target.pid.value != 0 && driver) {
    CurrentPhase::set("processes");
    STASIS_TRY_ASSIGN(auto found, examine_tree(**driver, options, context.interrupt));
    tree = std::move(found);
  }
  ticker.reset();
  const Severity severity = std::max(worst(machine), worst(tree));
  const int status = severity == Severity::kRed ? 1 : 0;
  const Verdict verdict = verdict_of(machine, tree);
  if (context.json) {
    context.print({{"ok", severity != Severity::kRed},
                   {"light", severity_name(severity)},
                   {"verdict", verdict_json(verdict)},
                   {"machine", obstacles_json(machine)},
                   {"processes", obstacles_json(tree)}});
    return status;
  }
  print_verdict(context, "suspend", verdict.suspend);
  print_verdict(context, "dump", verdict.dump, verdict.suspend);
  print_verdict(context, "restore here", verdict.restore, verdict.dump);
  const std::size_t fine = print(
      context, {{fmt::format("Process {} and what is below it", options.target.pid.value), tree},
                {"This machine", machine}});
  if (fine > 0)
    context.terminal.out(fmt::format("{} more {} green; -v shows {}", fine,
                                     fine == 1 ? "check is" : "checks are",
                                     fine == 1 ? "it" : "them"));
  return status;
}

}  // namespace

Verb add_doctor(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "doctor",
      "say whether this machine, and a process tree, can be suspended, dumped and restored, and "
      "why not; exit status 1 if something is red");
  add_target(*command, options->target)->required(false);
  command
      ->add_option("-D,--images-dir", options->machine.images_dir,
                   "also examine the disk of this directory")
      ->type_name("DIR");
  command->add_flag("!--no-trial", options->machine.trial,
                    "do not suspend and resume a test process on each GPU");
  add_criu_path(*command, options->machine.criu_path);
  return {command, [options](Context& context) { return run(context, *options); }, true, true, true,
          false};
}

}  // namespace stasis::cli
