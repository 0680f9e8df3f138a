#include "report/trace_file.h"

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
#include "base/trace.h"
#include "base/units.h"
#include "base/version.h"

namespace stasis {
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

std::string text_of(json list) {
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

Result<void> write_file(const std::string& path, const std::string& text) {
  // A pipe that no program reads would hold us up for ever.
  STASIS_TRY_ASSIGN(
      auto file,
      open_file(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY, 0644));
  if (::fcntl(file.get(), F_SETFL, 0) != 0) return fail(errno_error("cannot write " + path, errno));
  return write_all(file.get(), text.data(), text.size(), path);
}

}  // namespace

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

Result<void> write_trace(const std::string& path, json events) {
  return write_file(path, text_of(std::move(events)));
}

Result<void> replace_trace(const std::string& path, json events) {
  const std::string text = text_of(std::move(events));
  std::error_code none;
  // A device or a pipe is not to be replaced.
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none))
    return write_file(path, text);
  const std::string next = path + ".new";
  auto written = write_file(next, text);
  if (written && ::rename(next.c_str(), path.c_str()) != 0)
    written = fail(errno_error("cannot replace " + path, errno));
  if (!written) (void)::unlink(next.c_str());
  return written;
}

}  // namespace stasis
