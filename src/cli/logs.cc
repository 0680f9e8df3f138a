#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <memory>
#include <tuple>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/verbs.h"
#include "criu/criu_log.h"
#include "image/directory.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

struct Log {
  std::string path;
  std::string name;
  UniqueFd directory;  // that it lies in
  timespec changed{};
  std::uint64_t bytes = 0;
  CriuLog content;
};

struct LogsArguments {
  std::string images_dir;
  bool full = false;
};

void add_log(const std::string& folder, const std::string& name, std::vector<Log>& out) {
  auto directory = open_file(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  struct stat info = {};
  if (!directory || ::fstatat(directory->get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
      !S_ISREG(info.st_mode)) {
    return;
  }
  CriuLog content = CriuLog::read(*directory, name);
  out.push_back({folder + "/" + name, name, std::move(*directory), info.st_mtim,
                 static_cast<std::uint64_t>(info.st_size), std::move(content)});
}

// Those in the image and those that stand beside it, the newest first.
Result<std::vector<Log>> find_logs(const std::string& images_dir) {
  std::vector<Log> out;
  const auto image = split_path(images_dir);
  if (!image) return fail(image.error());
  const std::string inside = image->path() + "/log";
  if (auto directory = open_file(AT_FDCWD, inside, O_RDONLY | O_DIRECTORY | O_NOFOLLOW)) {
    const auto names = list_directory(*directory, inside);
    if (!names) return fail(names.error());
    for (const std::string& name : *names)
      if (name.ends_with(".log")) add_log(inside, name, out);
  }
  add_log(image->parent_path, image->name + ".failed-dump.log", out);
  std::stable_sort(out.begin(), out.end(), [](const Log& a, const Log& b) {
    return std::tie(a.changed.tv_sec, a.changed.tv_nsec) >
           std::tie(b.changed.tv_sec, b.changed.tv_nsec);
  });
  return out;
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
  std::string out =
      fmt::format("{}  ({}, {})", log.path, time_text(log.changed), format_bytes(log.bytes));
  if (log.content.errors.empty() && !log.content.diagnosis) out += "\n  no errors";
  for (const std::string& error : log.content.errors)
    out += "\n  " + error;
  if (log.content.diagnosis) {
    out += fmt::format("\n  what it means: {}\n  what to do: {}", log.content.diagnosis->meaning,
                       log.content.diagnosis->remedy);
  }
  context.terminal.out_block(out);
}

json log_json(const Log& log) {
  json out = {{"path", log.path},
              {"changed", time_text(log.changed)},
              {"bytes", log.bytes},
              {"errors", log.content.errors}};
  if (log.content.diagnosis) {
    out["diagnosis"] = {{"code", error_code_name(log.content.diagnosis->code)},
                        {"line", log.content.diagnosis->line},
                        {"meaning", log.content.diagnosis->meaning},
                        {"remedy", log.content.diagnosis->remedy}};
  }
  return out;
}

Result<int> run_logs(Context& context, const LogsArguments& arguments) {
  const auto found = find_logs(arguments.images_dir);
  if (!found) return fail(found.error());
  const std::vector<Log>& logs = *found;
  if (logs.empty()) {
    return fail(ErrorCode::kImageIncomplete,
                fmt::format("there are no logs in or beside {}", arguments.images_dir),
                "give the directory of an image, or the one that a dump was to make");
  }
  if (arguments.full && context.json) {
    return fail(ErrorCode::kUsage, "--full and --json exclude each other", "leave one of them out");
  }
  if (arguments.full) {
    const auto text = read_file(logs.front().directory.get(), logs.front().name);
    if (!text) return fail(text.error());
    context.terminal.out_block(*text);
    return 0;
  }
  json out = json::array();
  for (const Log& log : logs) {
    if (context.json)
      out.push_back(log_json(log));
    else
      print_errors(context, log);
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
