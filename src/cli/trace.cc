// --trace.
#include <utility>

#include "cli/verbs.h"
#include "report/trace_file.h"

namespace stasis::cli {

void add_trace(CLI::App& command, std::string& path) {
  command
      .add_option("--trace", path,
                  "write what is done when into this file, for Perfetto or chrome://tracing")
      ->type_name("FILE");
}

void Context::end_trace(const std::string& verb) {
  const std::string path = std::exchange(trace, {});
  if (path.empty()) return;
  nlohmann::json list = trace_of_process(verb);
  for (nlohmann::json& events : traces_of_helpers)
    for (nlohmann::json& event : events)
      list.push_back(std::move(event));
  auto written = write_trace(path, std::move(list));
  if (written) return;
  // The user has asked for it: that it is not there is said with --json and -q, too.
  terminal.set_quiet(false);
  terminal.note("no trace: " + written.error().to_string());
}

}  // namespace stasis::cli
