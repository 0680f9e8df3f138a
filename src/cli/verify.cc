#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/verbs.h"
#include "operations/image_report.h"

namespace stasis::cli {
namespace {

Result<int> run_verify(Context& context, std::string images_dir) {
  find_image(context, images_dir);
  STASIS_TRY_ASSIGN(const auto report,
                    verify_image(images_dir, context.terminal, context.interrupt));
  if (context.json) {
    context.print(to_json(report));
    return 0;
  }
  context.terminal.out(fmt::format("{} is whole: {} in {} files, read in {} ({})",
                                   printable(report.path), format_bytes(report.bytes), report.files,
                                   format_seconds(Seconds(report.seconds)),
                                   format_rate(report.bytes, Seconds(report.seconds))));
  for (const auto& content : {report.content, report.host_content})
    if (content) context.terminal.out(content_text(*content));
  return 0;
}

}  // namespace

Verb add_verify(CLI::App& app) {
  auto images_dir = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "verify", "read an image to its last byte and compare it with its checksums");
  command->add_option("DIR,-D,--images-dir", *images_dir, kImageHelp)->required()->type_name("DIR");
  return {command, [images_dir](Context& context) { return run_verify(context, *images_dir); },
          false, false, true};
}

}  // namespace stasis::cli
