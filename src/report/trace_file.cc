#include "report/trace_file.h"

#include <fcntl.h>
#include <poll.h>
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

// A pipe that no program reads would hold the tool up for ever, unless it is not waited for.
Result<void> write_file(const std::string& path, const std::string& text, int how) {
  constexpr int kLongest = 2000;  // ms without a byte
  STASIS_TRY_ASSIGN(
      auto file, open_file(AT_FDCWD, path, how | O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY, 0644));
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(file.get(), text.data() + done, text.size() - done);
    pollfd look{file.get(), POLLOUT, 0};
    if (written == 0) errno = EIO;
    if (written > 0)
      done += static_cast<std::size_t>(written);
    else if (errno == EAGAIN && ::poll(&look, 1, kLongest) == 0)
      return fail(ErrorCode::kIo,
                  fmt::format("cannot write {}: no program has read from it for {} s", path,
                              kLongest / 1000),
                  "read it, or name a file");
    else if (errno != EAGAIN && errno != EINTR)
      return fail(errno_error("cannot write " + path, errno));
  }
  return {};
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
  return write_file(path, text_of(std::move(events)), O_TRUNC);
}

Result<void> replace_trace(const std::string& path, json events) {
  const std::string text = text_of(std::move(events));
  std::error_code none;
  // A device or a pipe is not to be replaced.
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none))
    return write_file(path, text, O_TRUNC);
  // Another user who may write in that folder may have made it a link to any file.
  const std::string next = path + ".new";
  (void)::unlink(next.c_str());
  auto written = write_file(next, text, O_EXCL | O_NOFOLLOW);
  if (written && ::rename(next.c_str(), path.c_str()) != 0)
    written = fail(errno_error("cannot replace " + path, errno));
  if (!written) (void)::unlink(next.c_str());
  return written;
}

}  // namespace stasis
