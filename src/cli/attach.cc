#include <memory>

#include <fmt/format.h>

#include "cli/target.h"
#include "cli/ticker.h"
#include "cli/verbs.h"
#include "operations/agent_library.h"

namespace stasis::cli {
namespace {

// For people; the names are those of the JSON.
std::string words_of(const std::string& why) {
  if (why == "small") return "less than 2 MiB each";
  if (why == "shared-area") return "beside other blocks in one of the driver's areas";
  if (why == "no-room") return "no GPU memory for a copy";
  if (why == "address") return "its address could not be had, and it went back";
  if (why == "failed")
    return "the driver refused it, as where the process may have no more addresses (ulimit -v)";
  return "of pools, of cuMemCreate, managed, or a module's";
}

std::string in_blocks(std::uint64_t count) {
  return fmt::format("in {} block{}", count, count == 1 ? "" : "s");
}

void print(Context& context, const AttachReport& report) {
  if (report.was_so) {
    context.terminal.out(subject_text(report) + " had its agent already");
    for (const AttachedProcess& one : report.attached) {
      for (const AttachedProcess::Left& left : one.left) {
        context.terminal.out(fmt::format(
            "  process {} ({}): {} {} stayed with the driver when it came: {}", one.pid.value,
            one.comm, format_bytes(left.bytes), in_blocks(left.count), words_of(left.why)));
      }
    }
    return;
  }
  context.terminal.out(fmt::format("attached to {} in {}{}", subject_text(report),
                                   format_seconds(report.total), downtime_text(report)));
  for (const AttachedProcess& one : report.attached) {
    if (one.was_so) continue;
    context.terminal.out(fmt::format("  process {} ({}): the agent has {} of GPU memory {} now",
                                     one.pid.value, one.comm, format_bytes(one.converted_bytes),
                                     in_blocks(one.converted_count)));
    for (const AttachedProcess::Left& left : one.left) {
      context.terminal.out(fmt::format("    {} {} stay{} with the driver: {}",
                                       format_bytes(left.bytes), in_blocks(left.count),
                                       left.count == 1 ? "s" : "", words_of(left.why)));
    }
  }
}

std::vector<CLI::Option*> add_attach_way(CLI::App& command, AttachWay& way) {
  return {
      add_duration(
          command, "--watch-graphs", "s",
          [&way](std::chrono::milliseconds time) {
            if (time.count() == 0) {
              throw CLI::ValidationError(
                  "--watch-graphs",
                  "0 is no time to watch for; give a time in which the programs would launch each "
                  "of their graphs, e.g. 30s, or --graphs-are-safe");
            }
            way.watch = time;
          },
          "watch the programs so long, a time in which they would launch each of their CUDA "
          "graphs, "
          "and refuse them if they launch or make one; a bare number is seconds, where that of "
          "--timeout is milliseconds"),
      command.add_flag(
          "--graphs-are-safe", way.graphs_are_safe,
          "the programs use no CUDA graphs, or none with a copy from or to the host in "
          "it: do not watch them")};
}

}  // namespace

void add_attach_first(CLI::App& command, AttachFirst& first) {
  auto* flag = command.add_flag("--attach", first.wanted,
                                "bring the agent first to what was not started by `stasis run`, "
                                "as `stasis attach` does; needs --graphs-are-safe or "
                                "--watch-graphs");
  for (CLI::Option* option : add_attach_way(command, first.way))
    option->needs(flag)->description("with --attach: " + option->get_description());
}

Result<std::optional<AttachWay>> AttachFirst::open(MemoryPath path) const {
  if (!wanted) return std::optional<AttachWay>();
  if (path == MemoryPath::kDriver) {
    return fail(ErrorCode::kUsage, "--attach brings the agent, which --path driver leaves alone",
                "give one of them");
  }
  AttachWay opened = way;
  STASIS_TRY_ASSIGN(opened.library, open_agent_library());
  return std::optional(std::move(opened));
}

Verb add_attach(CLI::App& app) {
  struct Options {
    Target target;
    AttachOptions attach;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "attach",
      "bring the agent to a process tree that runs: later verbs are as fast as for "
      "`stasis run`; needs your word on its CUDA graphs: --graphs-are-safe or --watch-graphs");
  add_target(*command, options->target);
  add_timeout(*command, options->attach.timeout);
  add_attach_way(*command, options->attach.way);
  command->add_flag("--ignore-obstacles", options->attach.ignore_obstacles,
                    "go on although the driver may refuse or lose the program's memory");
  return {command, [options](Context& context) -> Result<int> {
            STASIS_TRY_ASSIGN(options->attach.way.library, open_agent_library());
            STASIS_TRY(reach(context, options->target));
            STASIS_TRY_ASSIGN(auto driver, context.load_driver(Context::Movers::kNone));
            const Ticker ticker(context.terminal, context.interrupt);
            STASIS_TRY_ASSIGN(auto report, attach_agents(context.environment(*driver),
                                                         options->target.pid, options->attach));
            context.figures = figures_of(report);
            if (context.json) {
              context.print(to_json(report));
              return 0;
            }
            print(context, report);
            context.terminal.debug(phases_text(report));
            return 0;
          }};
}

}  // namespace stasis::cli
