#include <memory>

#include <fmt/format.h>

#include "cli/group.h"
#include "cli/target.h"
#include "cli/ticker.h"
#include "cli/verbs.h"

namespace stasis::cli {

Verb add_suspend(CLI::App& app) {
  struct Options {
    Target target;
    SuspendOptions suspend;
    AttachFirst attach;
    GroupOptions group;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "suspend", "free a program's GPU memory; it stands still until it is resumed");
  add_target(*command, options->target);
  add_timeout(*command, options->suspend.timeout);
  add_path(*command, options->suspend.path);
  add_attach_first(*command, options->attach);
  // Which takes seconds, in which the others would wait: `stasis attach` before that does the same.
  options->group.add_to(*command)->excludes(command->get_option("--attach"));
  command->add_flag("--ignore-obstacles", options->suspend.ignore_obstacles,
                    "go on although the driver may refuse or lose the program's memory");
  // As older versions called it; `--force` is for what is overwritten.
  command->add_flag("--force", options->suspend.ignore_obstacles)->group("");
  return {command, [options](Context& context) -> Result<int> {
            STASIS_TRY_ASSIGN(options->suspend.attach, options->attach.open(options->suspend.path));
            STASIS_TRY(options->group.open());
            auto reached = reach(context, options->target);
            auto driver = reached ? context.load_driver(Context::Movers::kSpare)
                                  : fail(std::move(reached.error()));
            if (!driver)
              return fail(options->group.refuse(Operation::kSuspend, options->suspend.timeout,
                                                context.interrupt, std::move(driver.error())));
            const Ticker ticker(context.terminal, context.interrupt);
            STASIS_TRY_ASSIGN(const auto part,
                              options->group.join(Operation::kSuspend, options->suspend.timeout,
                                                  context.interrupt));
            options->suspend.part = part.get();
            STASIS_TRY_ASSIGN(auto report, suspend(context.environment(**driver),
                                                   options->target.pid, options->suspend));
            STASIS_TRY(leave_group(part.get(), subject_text(report) + " is suspended"));
            if (!report.was_so) context.figures = figures_of(report);
            if (context.json) {
              context.print(to_json(report));
              return 0;
            }
            if (report.was_so) {
              context.terminal.out(
                  fmt::format("{} was suspended already; `stasis resume {}` brings it back",
                              subject_text(report), options->target.text));
              return 0;
            }
            std::uint64_t bytes = 0;
            for (const ProcessReport& process : report.processes)
              bytes += process.gpu_bytes;
            context.terminal.out(fmt::format(
                "suspended {} in {}{}{}", subject_text(report), format_seconds(report.total),
                downtime_text(report),
                bytes > 0 ? fmt::format("; {} of GPU memory are free again", format_bytes(bytes))
                          : ""));
            context.terminal.debug(phases_text(report));
            return 0;
          }};
}

}  // namespace stasis::cli
