#include <memory>

#include <fmt/format.h>

#include "cli/group.h"
#include "cli/target.h"
#include "cli/ticker.h"
#include "cli/verbs.h"

namespace stasis::cli {

Verb add_resume(CLI::App& app) {
  struct Options {
    Target target;
    std::optional<std::string> device_map;
    std::string images_dir;
    std::chrono::milliseconds limit{0};
    GroupOptions group;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("resume", "restore and unlock a suspended process tree: it runs again");
  add_target(*command, options->target);
  add_device_map(*command, options->device_map);
  command
      ->add_option("-D,--images-dir", options->images_dir,
                   "the image that holds the content of its GPU memory, if that was moved or the "
                   "state directory was lost")
      ->type_name("DIR");
  add_time_limit(*command, options->limit,
                 "it is left suspended, unless its memory is on the way back");
  options->group.add_to(*command);
  return {command, [options](Context& context) -> Result<int> {
            ResumeOptions resume_options;
            resume_options.images_dir = options->images_dir;
            if (options->device_map) {
              STASIS_TRY_ASSIGN(auto map, parse_gpu_map(*options->device_map));
              resume_options.gpu_map = std::move(map);
            }
            context.interrupt.set_time_limit(options->limit);
            STASIS_TRY(options->group.open());
            STASIS_TRY(reach(context, options->target));
            STASIS_TRY_ASSIGN(auto driver, context.load_driver(Context::Movers::kOne));
            const Ticker ticker(context.terminal, context.interrupt);
            // How long the others may take to come, which are waited for afterwards.
            const auto timeout =
                options->limit.count() > 0 ? options->limit : GroupPartOptions().timeout;
            STASIS_TRY_ASSIGN(const auto part,
                              options->group.join(Operation::kResume, timeout, context.interrupt));
            resume_options.part = part.get();
            STASIS_TRY_ASSIGN(auto report, resume(context.environment(*driver), options->target.pid,
                                                  resume_options));
            if (!report.was_so) context.figures = figures_of(report);
            if (context.json) {
              context.print(to_json(report));
              return 0;
            }
            if (report.was_so) {
              context.terminal.out(subject_text(report) + " was running already");
              return 0;
            }
            context.terminal.out(fmt::format("resumed {} in {}", subject_text(report),
                                             format_seconds(report.total)));
            context.terminal.debug(phases_text(report));
            return 0;
          }};
}

}  // namespace stasis::cli
