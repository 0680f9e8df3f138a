#include "cli/swap.h"

#include <memory>
#include <utility>

#include <fmt/format.h>

#include "base/helper_process.h"
#include "cli/target.h"
#include "report/report.h"

namespace stasis::cli {
namespace {

struct SwapArguments {
  Target out;
  Target in;
  job::SwapOptions swap;
  AttachFirst attach;
  std::optional<std::string> device_map;
};

std::string part_text(const job::SwapReport::Side& side) {
  return fmt::format("{} ({}) in {}", side.name, subject_text(side.report),
                     format_seconds(side.report.total));
}

Result<int> run_swap(Context& context, SwapArguments& arguments) {
  STASIS_TRY_ASSIGN(arguments.swap.attach, arguments.attach.open(arguments.swap.path));
  arguments.swap.gpu_map = arguments.device_map.value_or(std::string());
  STASIS_TRY_ASSIGN(const auto done,
                    job::swap(swap_caller(context), arguments.out, arguments.in, arguments.swap));
  context.figures.emplace().total = done.total;
  if (context.json) {
    context.print(to_json(done));
    return 0;
  }
  if (!done.no_room_at_once.empty()) {
    context.terminal.note(fmt::format("there was no room for {} beside {} after all: {}",
                                      done.resumed.name, done.suspended.name,
                                      done.no_room_at_once));
  }
  context.terminal.out(fmt::format(
      "suspended {}, resumed {}; {} in all, {}", part_text(done.suspended), part_text(done.resumed),
      format_seconds(done.total), done.at_once ? "both at once" : "one after the other"));
  return 0;
}

}  // namespace

job::SwapCaller swap_caller(Context& context) {
  return {context.interrupt,
          context.terminal,
          context.session.ring_bytes,
          context.session.timeouts,
          [] { return HelperProcess::start(job::kSwapSideName, job::serve_swap_side); },
          [&context](const std::string& text) { context.note(text); },
          [&context](const std::string& library) {
            if (!context.json) context.terminal.note("this is the simulated GPU (" + library + ")");
          },
          [&context](nlohmann::json events) {
            context.traces_of_helpers.push_back(std::move(events));
          }};
}

Verb add_swap(CLI::App& app) {
  auto options = std::make_shared<SwapArguments>();
  CLI::App* command = app.add_subcommand(
      "swap", "suspend one process tree and resume another in its place, at once where both fit");
  add_target(*command, options->out, "OUT");
  add_target(*command, options->in, "IN");
  command->get_option("OUT")->description(
      "the process to suspend: its number, or the name of the job");
  command->get_option("IN")->description("the process to resume, likewise");
  add_timeout(*command, options->swap.timeout);
  add_path(*command, options->swap.path);
  add_attach_first(*command, options->attach);
  add_device_map(*command, options->device_map);
  command->add_flag("--ignore-obstacles", options->swap.ignore_obstacles,
                    "go on although the driver may refuse or lose the first one's memory");
  return {command, [options](Context& context) { return run_swap(context, *options); }};
}

}  // namespace stasis::cli
