// `stasis`: parses the command line, runs one verb, and is the one place where an Error becomes an
// exit status.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string_view>

#include <fmt/format.h>

#include "cli/verbs.h"
#include "stasis/version.h"

namespace stasis::cli {
namespace {

constexpr const char* kDescription =
    "Stasis suspends, saves and brings back running CUDA programs, without changing them.";

constexpr const char* kFooter =
    "Exit status: 0 done, 1 failed, 2 usage, 3 no such process, 4 does not use CUDA, 5 not\n"
    "permitted, 6 wrong state, 7 time-out or busy, 8 driver, 9 CRIU, 10 image, 11 no room (disk,\n"
    "GPU, process number), 12 something is left behind: run `stasis recover`; 128+N signal N.\n"
    "STASIS_LIBCUDA names the driver's library, STASIS_CRIU the criu program.";

int report_error(Context& context, const Error& error) {
  int status = exit_status(error.code);
  if (error.code == ErrorCode::kInterrupted && context.interrupt.requested()) {
    status = 128 + context.interrupt.signal_number();
  }
  if (context.json) {
    nlohmann::json out = to_json(error);
    out["error"]["exit_status"] = status;
    context.terminal.out(json_text(out));
  } else {
    context.terminal.error(error);
  }
  return status;
}

Error usage_error(const CLI::App& app, const CLI::ParseError& error) {
  std::string help = "stasis --help";
  for (const CLI::App* verb : app.get_subcommands())
    help = "stasis " + verb->get_name() + " --help";
  return {ErrorCode::kUsage, error.what(), "see `" + help + "`", {}, {}};
}

int run(int argc, char** argv) {
  Terminal terminal;
  Interrupt interrupt;
  Context context{terminal, interrupt};

  CLI::App app(kDescription, "stasis");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("stasis ") + kVersion);
  app.require_subcommand(1);
  bool quiet = false;
  const auto add_common = [&](CLI::App& command) {
    command.add_flag("--json", context.json, "print one JSON object instead of text");
    command.add_flag("-v,--verbose", context.verbose, "say more: phases and times");
    command.add_flag("-q,--quiet", quiet, "no progress and no notes");
  };
  const std::array verbs = {add_ps(app),   add_suspend(app), add_resume(app),
                            add_dump(app), add_restore(app), add_recover(app)};
  for (const Verb& verb : verbs)
    add_common(*verb.command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    // Parsing may have ended before it came to --json.
    context.json = std::any_of(argv, argv + argc,
                               [](const char* word) { return std::string_view(word) == "--json"; });
    return report_error(context, usage_error(app, error));
  }
  terminal.set_quiet(quiet || context.json);
  terminal.set_verbose(context.verbose);
  install_signal_handlers(interrupt);
  for (const Verb& verb : verbs) {
    if (!verb.command->parsed()) continue;
    auto status = verb.run(context);
    return status ? *status : report_error(context, status.error());
  }
  return exit_status(ErrorCode::kInternal);
}

}  // namespace
}  // namespace stasis::cli

int main(int argc, char** argv) {
  try {
    return stasis::cli::run(argc, argv);
  } catch (const std::exception& error) {
    // No function of ours throws; this is memory, or a bug.
    std::fprintf(stderr, "stasis: error: %s\n", error.what());
    return 1;
  }
}
