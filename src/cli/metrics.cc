// --metrics, and what a verb did for --log-json.
#include "report/metrics.h"

#include <utility>

#include "cli/verbs.h"

namespace stasis::cli {

CLI::Option* add_metrics_option(CLI::App& command, std::string& directory) {
  return command
      .add_option("--metrics", directory,
                  "add what this took to DIR/stasis.prom, for the textfile collector of "
                  "Prometheus's node_exporter")
      ->type_name("DIR");
}

Result<void> Context::begin_metrics() {
  if (metrics.empty()) return {};
  STASIS_TRY_ASSIGN(metrics_dir, open_metrics(metrics));
  return {};
}

void Context::end_measures(const std::string& verb, const Error* error) {
  if (std::exchange(is_measured, true)) return;
  if (error == nullptr) log_figures();
  const UniqueFd directory = std::exchange(metrics_dir, {});
  if (!directory.valid()) return;
  auto written = error != nullptr ? add_metrics(directory, verb, *error)
                                  : add_metrics(directory, verb, figures);
  if (written) return;
  // As for the trace.
  terminal.set_quiet(false);
  terminal.note("no metrics: " + written.error().to_string());
}

void Context::log_figures() const {
  if (!terminal.logs()) return;
  nlohmann::json out = {{"result", "ok"}};
  if (figures) {
    out["seconds"] = figures->total.count();
    if (figures->downtime) out["standstill_seconds"] = figures->downtime->count();
    out["gpu_bytes"] = figures->gpu_bytes;
    out["image_bytes"] = figures->image_bytes;
    out["written_bytes"] = figures->written_bytes;
  }
  terminal.log("done", out);
}

}  // namespace stasis::cli
