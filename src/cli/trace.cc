// What a verb did when, as a file for the viewers of Chrome's trace format (Perfetto,
// chrome://tracing): an object with "traceEvents", of which those of phase "X" have a begin and a
// duration in microseconds.
#include "base/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/version.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// The phases get a row of their own, above those of the threads; and so does each agent, because
// several are at work while one thread waits for them. A process's number is no thread's of ours.
int row_of(const TraceEvent& event) {
  if (event.kind == TraceKind::kPhase) return 0;
  return event.kind == TraceKind::kAgent ? event.target.value : event.thread;
}

json event_json(const TraceEvent& event) {
  json arguments = json::object();
  if (event.target.value != 0) arguments["process"] = event.target.value;
  if (event.bytes != 0) {
    arguments["bytes"] = event.bytes;
    arguments["rate"] = format_rate(event.bytes, event.end - event.start);
  }
  return {{"name", event.name},
          {"cat", trace_kind_name(event.kind)},
          {"ph", "X"},
          {"ts", microseconds(event.start.time_since_epoch())},
          {"dur", microseconds(event.end - event.start)},
          {"pid", ::getpid()},
          {"tid", row_of(event)},
          {"args", std::move(arguments)}};
}

json name_json(const char* what, int row, const std::string& name) {
  return {
      {"name", what}, {"ph", "M"}, {"pid", ::getpid()}, {"tid", row}, {"args", {{"name", name}}}};
}

}  // namespace

void add_trace(CLI::App& command, std::string& path) {
  command
      .add_option("--trace", path,
                  "write what is done when into this file, for Perfetto or chrome://tracing")
      ->type_name("FILE");
}

json trace_of_process(const std::string& name) {
  json list = json::array();
  list.push_back(name_json("process_name", 0, "stasis " + name));
  list.push_back(name_json("thread_name", 0, "phases"));
  std::set<int> agents;
  for (const TraceEvent& event : trace_events()) {
    const int row = row_of(event);
    if (event.kind == TraceKind::kAgent && agents.insert(row).second)
      list.push_back(name_json("thread_name", row, fmt::format("agent of process {}", row)));
    list.push_back(event_json(event));
  }
  return list;
}

namespace {

// Times count from the first of them.
std::string trace_text(json list) {
  std::optional<double> first;
  for (const json& event : list)
    if (event.contains("ts")) first = std::min(first.value_or(event["ts"]), double{event["ts"]});
  for (json& event : list)
    if (event.contains("ts")) event["ts"] = double{event["ts"]} - *first;
  return json{{"traceEvents", std::move(list)},
              {"displayTimeUnit", "ms"},
              {"otherData", {{"program", std::string("stasis ") + kVersion}}}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<void> write_trace(const std::string& path, const std::string& text) {
  // A pipe that no program reads would hold us up for ever.
  STASIS_TRY_ASSIGN(
      auto file,
      open_file(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY, 0644));
  if (::fcntl(file.get(), F_SETFL, 0) != 0) return fail(errno_error("cannot write " + path, errno));
  return write_all(file.get(), text.data(), text.size(), path);
}

}  // namespace

Result<void> replace_trace(const std::string& path, const std::string& name) {
  const std::string text = trace_text(trace_of_process(name));
  std::error_code none;
  // A device or a pipe is not to be replaced.
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none))
    return write_trace(path, text);
  const std::string next = path + ".new";
  auto written = write_trace(next, text);
  if (written && ::rename(next.c_str(), path.c_str()) != 0)
    written = fail(errno_error("cannot replace " + path, errno));
  if (!written) (void)::unlink(next.c_str());
  return written;
}

void Context::end_trace(const std::string& verb) {
  const std::string path = std::exchange(trace, {});
  if (path.empty()) return;
  nlohmann::json list = trace_of_process(verb);
  for (nlohmann::json& events : traces_of_helpers)
    for (nlohmann::json& event : events)
      list.push_back(std::move(event));
  auto written = write_trace(path, trace_text(std::move(list)));
  if (written) return;
  // The user has asked for it: that it is not there is said with --json and -q, too.
  terminal.set_quiet(false);
  terminal.note("no trace: " + written.error().to_string());
}

}  // namespace stasis::cli
