#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <memory>
#include <tuple>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/verbs.h"
#include "criu/criu_log.h"
#include "image/directory.h"
#include "image/image_reader.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

struct Log {
  std::string folder;
  std::string name;
  timespec changed{};
  std::uint64_t bytes = 0;

  std::string path() const { return folder + "/" + name; }
};

struct LogsArguments {
  std::string images_dir;
  bool full = false;
};

// The newest of more are shown.
constexpr std::size_t kMostLogs = 100;

// "dump.log", "restore-20261122T040000Z.log", and "….log.2" of the same second.
bool is_log(std::string_view name) {
  const std::size_t at = name.rfind(".log");
  if (at == std::string_view::npos) return false;
  name.remove_prefix(at + 4);
  return name.empty() || (name.size() > 1 && name.front() == '.' &&
                          name.find_first_not_of("0123456789", 1) == std::string_view::npos);
}

// The logs in a folder; none if it is not there. kNotPermitted, kIo.
Result<void> collect_logs(const std::string& folder, std::vector<Log>& out) {
  auto directory = open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!directory) {
    if (directory.error().code == ErrorCode::kNotPermitted) return fail(directory.error());
    return {};
  }
  const auto names = list_directory(*directory, folder);
  if (!names) return fail(names.error());
  for (const std::string& name : *names) {
    struct stat info = {};
    if (!is_log(name) || ::fstatat(directory->get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    if (S_ISREG(info.st_mode))
      out.push_back({folder, name, info.st_mtim, static_cast<std::uint64_t>(info.st_size)});
  }
  return {};
}

// Those in the image, those that stand beside it, and those of dumps to that name that did not come
// to their end; the newest first.
Result<std::vector<Log>> find_logs(const std::string& images_dir) {
  std::vector<Log> out;
  std::error_code none;
  std::filesystem::path image = std::filesystem::canonical(images_dir, none);
  if (none) {
    auto entry = split_path(images_dir);
    if (!entry && entry.error().code == ErrorCode::kUsage) return fail(entry.error());
    if (!entry) return out;
    image = entry->path();
  }
  if (auto added = collect_logs(image.string() + "/log", out); !added) return fail(added.error());
  for (const Leftover& leftover : find_leftovers(image.string()))
    if (auto added = collect_logs(leftover.path + "/log", out); !added) return fail(added.error());
  const std::string failed = image.filename().string() + ".failed-dump.log";
  struct stat info = {};
  if (::lstat((image.parent_path() / failed).c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
    out.push_back({image.parent_path().string(), failed, info.st_mtim,
                   static_cast<std::uint64_t>(info.st_size)});
  }
  std::stable_sort(out.begin(), out.end(), [](const Log& a, const Log& b) {
    return std::tie(a.changed.tv_sec, a.changed.tv_nsec) >
           std::tie(b.changed.tv_sec, b.changed.tv_nsec);
  });
  if (out.size() > kMostLogs) out.resize(kMostLogs);
  return out;
}

// A regular file; links are not followed, and a pipe in its place does not hold us up.
Result<UniqueFd> open_log(const Log& log) {
  auto file = open_file(AT_FDCWD, log.path(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat info = {};
  if (file && (::fstat(file->get(), &info) != 0 || !S_ISREG(info.st_mode)))
    return fail(ErrorCode::kIo, log.path() + " is no regular file", "see what has replaced it");
  return file;
}

Result<CriuLog> read_log(const Log& log) {
  auto file = open_log(log);
  if (!file) return fail(file.error());
  return CriuLog::read(*file);
}

std::string time_text(const timespec& moment) {
  std::tm parts{};
  std::array<char, 32> text{};
  if (::gmtime_r(&moment.tv_sec, &parts) == nullptr ||
      std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts) == 0)
    return "?";
  return text.data();
}

void print_errors(Context& context, const Log& log) {
  std::string out = fmt::format("{}  ({}, {})", printable(log.path()), time_text(log.changed),
                                format_bytes(log.bytes));
  const auto content = read_log(log);
  if (!content) {
    out += "\n  cannot be read: " + printable(content.error().to_string());
    return context.terminal.out_block(out);
  }
  if (content->truncated) out += "\n  only its end was read; --full shows all of the newest";
  if (content->errors.empty() && !content->diagnosis) out += "\n  no errors";
  for (const std::string& error : content->errors)
    out += "\n  " + printable(error);
  if (content->diagnosis) {
    out += fmt::format("\n  what it means: {}\n  what to do: {}", content->diagnosis->meaning,
                       content->diagnosis->remedy);
  }
  context.terminal.out_block(out);
}

json log_json(const Log& log) {
  json out = {{"path", log.path()}, {"changed", time_text(log.changed)}, {"bytes", log.bytes}};
  const auto content = read_log(log);
  if (!content) {
    out["error"] = to_json(content.error())["error"];
    return out;
  }
  out["errors"] = content->errors;
  out["truncated"] = content->truncated;
  if (content->diagnosis) out["diagnosis"] = to_json(*content->diagnosis);
  return out;
}

// Line by line, so that a log of any size can be shown.
Result<int> print_all(Context& context, const Log& log) {
  auto file = open_log(log);
  if (!file) return fail(file.error());
  constexpr std::size_t kPiece = 1 << 20;
  std::string text;
  for (;;) {
    const std::size_t kept = text.size();
    text.resize(kept + kPiece);
    const ssize_t got = ::read(file->get(), text.data() + kept, kPiece);
    if (got < 0) return fail(errno_error("cannot read " + log.path(), errno));
    text.resize(kept + static_cast<std::size_t>(got));
    if (got == 0) break;
    const std::size_t end = text.rfind('\n');
    if (end == std::string::npos && text.size() < kPiece) continue;
    const std::size_t shown = end == std::string::npos ? text.size() : end;
    context.terminal.out_block(text.substr(0, shown));
    text.erase(0, shown + 1);
  }
  if (!text.empty()) context.terminal.out_block(text);
  return 0;
}

Result<int> run_logs(Context& context, const LogsArguments& arguments) {
  if (arguments.full && context.json)
    return fail(ErrorCode::kUsage, "--full and --json exclude each other", "leave one of them out");
  const auto logs = find_logs(arguments.images_dir);
  if (!logs) return fail(logs.error());
  if (logs->empty()) {
    return fail(ErrorCode::kImageIncomplete,
                fmt::format("there are no logs in or beside {}", arguments.images_dir),
                "give the directory of an image, or the one that a dump was to make");
  }
  if (arguments.full) return print_all(context, logs->front());
  json out = json::array();
  for (const Log& log : *logs) {
    if (context.json) {
      out.push_back(log_json(log));
    } else {
      print_errors(context, log);
    }
  }
  if (context.json) context.print({{"ok", true}, {"logs", out}});
  return 0;
}

}  // namespace

Verb add_logs(CLI::App& app) {
  auto arguments = std::make_shared<LogsArguments>();
  CLI::App* command = app.add_subcommand(
      "logs",
      "show the errors in CRIU's logs of a dump or of restores, the newest first, and what "
      "they mean");
  command->add_option("DIR,-D,--images-dir", arguments->images_dir, "directory of the image")
      ->required()
      ->type_name("DIR");
  command->add_flag("--full", arguments->full, "the whole of the newest one");
  return {command, [arguments](Context& context) { return run_logs(context, *arguments); }, false};
}

}  // namespace stasis::cli
