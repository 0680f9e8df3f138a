#include "report/trace_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/vfs.h>
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
#include "base/path_walk.h"
#include "base/trace.h"
#include "base/units.h"
#include "base/version.h"
#include "image/directory.h"
#include "proc/trusted_path.h"

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

// Where a file is to be written: only root, the caller and who has called him by sudo can have put
// a link on the way to it.
struct OutputPlace {
  std::string path;  // as the user gave it
  UniqueFd folder;
  std::string name;
  bool may_be_any = false;  // what is there: a device, a pipe, a descriptor of this process
};

bool is_trusted_owner(uid_t owner) {
  return owner == 0 || owner == ::geteuid() || proc::sudo_caller().uid == owner;
}

tl::unexpected<Error> not_written(const std::string& path, const std::string& why) {
  return fail(ErrorCode::kNotPermitted, fmt::format("cannot write {}: {}", path, why),
              "name a file in a folder in which only this user can write, and without links on the "
              "way to it");
}

// Of a folder that may be believed: a link in it is followed if its owner is.
Result<OutputPlace> place_in_trusted(const std::string& path, std::string at) {
  for (int links = 0; links < kMostLinks; ++links) {
    const std::filesystem::path whole(at);
    const auto judged = proc::judge_path(whole.parent_path().string(), proc::sudo_caller());
    if (!judged.why_not.empty()) return not_written(path, judged.why_not);
    const std::string folder = judged.path.empty() ? "/" : judged.path;
    OutputPlace place{path, {}, whole.filename().string()};
    STASIS_TRY_ASSIGN(place.folder, open_file(AT_FDCWD, folder, O_PATH | O_DIRECTORY));
    struct stat info {};
    struct stat around {};
    struct statfs system {};
    if (::fstat(place.folder.get(), &around) != 0 || ::fstatfs(place.folder.get(), &system) != 0)
      return fail(errno_error("cannot stat " + folder, errno));
    // A link there leads to what this process has open.
    place.may_be_any = static_cast<std::uint32_t>(system.f_type) == PROC_SUPER_MAGIC;
    if (place.may_be_any ||
        ::fstatat(place.folder.get(), place.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
      return place;
    if (!is_trusted_owner(info.st_uid))
      return not_written(path, fmt::format("{} belongs to user {}", at, info.st_uid));
    if (!S_ISLNK(info.st_mode)) {
      // Where others may write they may have given any file that name, too.
      const bool is_others =
          S_ISREG(info.st_mode) && info.st_nlink > 1 && (around.st_mode & S_ISVTX) != 0;
      if (is_others) return not_written(path, "it has other names");
      place.may_be_any = true;
      return place;
    }
    std::error_code failed;
    const auto target = std::filesystem::read_symlink(folder + "/" + place.name, failed);
    if (failed) return not_written(path, failed.message());
    at = (std::filesystem::path(folder) / target).string();
  }
  return not_written(path, "it leads over too many links");
}

Result<OutputPlace> place_of_output(const std::string& path) {
  std::error_code failed;
  const std::filesystem::path whole = std::filesystem::absolute(path, failed);
  if (failed) return fail(ErrorCode::kIo, "cannot write " + path + ": " + failed.message());
  const std::string folder = whole.parent_path().string();
  // The usual error of one that is not there.
  STASIS_TRY(open_file(AT_FDCWD, folder, O_PATH | O_DIRECTORY));
  const auto judged = proc::judge_path(folder, proc::sudo_caller());
  if (judged.why_not.empty()) return place_in_trusted(path, whole.string());
  // Another user may put anything there while we look: no link is followed at all.
  STASIS_TRY_ASSIGN(const auto top, open_file(AT_FDCWD, "/", O_RDONLY | O_DIRECTORY));
  OutputPlace place{path, {}, whole.filename().string()};
  const std::string below = whole.parent_path().relative_path().lexically_normal().string();
  auto opened = open_beneath(top, below.empty() ? "." : below, O_PATH | O_DIRECTORY);
  if (!opened) return not_written(path, judged.why_not + ", and there is a link on the way");
  place.folder = std::move(*opened);
  return place;
}

Result<UniqueFd> open_output(const OutputPlace& place) {
  const int how =
      O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | (place.may_be_any ? O_TRUNC : O_NOFOLLOW);
  auto file = open_file(place.folder.get(), place.name, how, 0644);
  struct stat info {};
  if (!file && !place.may_be_any &&
      ::fstatat(place.folder.get(), place.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISLNK(info.st_mode))
    return not_written(place.path, "it is a link, in a folder in which another user may make one");
  if (!file) {
    // Not the name alone, which is what was opened.
    Error error = std::move(file.error());
    const std::string opened = "open " + place.name;
    if (const auto at = error.message.find(opened); at != std::string::npos)
      error.message.replace(at, opened.size(), "open " + place.path);
    return fail(std::move(error));
  }
  if (place.may_be_any) return file;
  if (::fstat(file->get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      !is_trusted_owner(info.st_uid) || info.st_nlink != 1)
    return not_written(place.path, "it is not a file of this user alone");
  if (::ftruncate(file->get(), 0) != 0)
    return fail(errno_error("cannot write " + place.path, errno));
  return file;
}

// A pipe that no program reads would hold the tool up for ever, unless it is not waited for.
Result<void> write_text(const UniqueFd& file, const std::string& path, const std::string& text) {
  constexpr int kLongest = 2000;  // ms without a byte
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

Result<void> write_place(const OutputPlace& place, const std::string& text) {
  STASIS_TRY_ASSIGN(const auto file, open_output(place));
  return write_text(file, place.path, text);
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
  STASIS_TRY_ASSIGN(const auto place, place_of_output(path));
  return write_place(place, text_of(std::move(events)));
}

Result<void> replace_trace(const std::string& path, json events) {
  const std::string text = text_of(std::move(events));
  STASIS_TRY_ASSIGN(const auto place, place_of_output(path));
  const int folder = place.folder.get();
  struct stat info {};
  // A device or a pipe is not to be replaced.
  if (::fstatat(folder, place.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
      !S_ISREG(info.st_mode))
    return write_place(place, text);
  // Another user who may write in that folder may have made it a link to any file.
  const std::string next = place.name + ".new";
  (void)::unlinkat(folder, next.c_str(), 0);
  STASIS_TRY_ASSIGN(const auto file,
                    open_file(folder, next, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0644));
  auto written = write_text(file, path, text);
  if (written && ::renameat(folder, next.c_str(), folder, place.name.c_str()) != 0)
    written = fail(errno_error("cannot replace " + path, errno));
  if (!written) (void)::unlinkat(folder, next.c_str(), 0);
  return written;
}

}  // namespace stasis
