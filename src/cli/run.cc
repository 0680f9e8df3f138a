// Starts a program with the agent loaded, so that its GPU memory can be moved by the direct path.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include "base/fd.h"
#include "cli/verbs.h"

namespace stasis::cli {

namespace {

constexpr const char* kLibrary = "libstasis-preload.so";

// Beside this program, as the build and the packages lay it out: bin/stasis, lib/stasis/.
Result<std::string> find_agent() {
  if (const char* named = std::getenv("STASIS_PRELOAD"); named && *named) {
    if (::access(named, R_OK) == 0) return std::string(named);
    return fail(ErrorCode::kIo, fmt::format("STASIS_PRELOAD names {}, which cannot be read", named),
                "let it name the file libstasis-preload.so, or unset it");
  }
  std::error_code failed;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", failed);
  const auto library = self.parent_path().parent_path() / "lib" / "stasis" / kLibrary;
  if (!failed && ::access(library.c_str(), R_OK) == 0) return library.string();
  return fail(ErrorCode::kIo, fmt::format("{} is not at {}", kLibrary, library.string()),
              "install Stasis whole, or let STASIS_PRELOAD name the file");
}

// In front of what is loaded already: the agent passes on what is not its own.
std::string with_agent(const std::string& library) {
  const char* others = std::getenv("LD_PRELOAD");
  if (!others || !*others) return library;
  const std::string list = others;
  if (list.find(library) != std::string::npos) return list;
  return library + ":" + list;
}

}  // namespace

Verb add_run(CLI::App& app) {
  auto words = std::make_shared<std::vector<std::string>>();
  CLI::App* command = app.add_subcommand(
      "run", "start a program so that its GPU memory can be moved at the speed of the bus");
  command->add_option("COMMAND", *words, "the program and its arguments; put -- before it")
      ->required();
  command->positionals_at_end();
  command->prefix_command(false);
  return {command,
          [words](Context&) -> Result<int> {
            auto library = find_agent();
            if (!library) return fail(std::move(library.error()));
            // The linker takes blanks and colons for separators.
            if (library->find_first_of(" :") != std::string::npos) {
              return fail(ErrorCode::kUsage,
                          fmt::format("the path {} has a blank or a colon, which LD_PRELOAD cannot "
                                      "hold",
                                      *library),
                          "let STASIS_PRELOAD name a link to it without");
            }
            ::setenv("LD_PRELOAD", with_agent(*library).c_str(), 1);
            std::vector<char*> argv;
            for (std::string& word : *words)
              argv.push_back(word.data());
            argv.push_back(nullptr);
            ::execvp(argv[0], argv.data());
            // As shells have it: 127 not found, 126 found and not to be started.
            const int why = errno;
            const Error error = errno_error(fmt::format("cannot start {}", argv[0]), why);
            fmt::print(stderr, "stasis: error: {}\n", error.to_string());
            return why == ENOENT ? 127 : 126;
          },
          false};
}

}  // namespace stasis::cli
