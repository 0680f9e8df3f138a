#include <unistd.h>

#include <cerrno>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/verbs.h"
#include "operations/image_logs.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

struct LogsArguments {
  std::string images_dir;
  bool full = false;
};

void print_errors(Context& context, const ImageLog& log) {
  std::string out = fmt::format("{}  ({}, {})", printable(log.path()), utc_text(log.changed),
                                format_bytes(log.bytes));
  const auto content = read_image_log(log);
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

json log_json(const ImageLog& log) {
  json out = {{"path", log.path()}, {"changed", utc_text(log.changed)},
              {"bytes", log.bytes}, {"errors", json::array()},
              {"truncated", false}, {"diagnosis", nullptr},
              {"error", nullptr}};
  const auto content = read_image_log(log);
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
Result<int> print_all(Context& context, const ImageLog& log) {
  STASIS_TRY_ASSIGN(auto file, open_image_log(log));
  constexpr std::size_t kPiece = 1 << 20;
  std::string text;
  for (;;) {
    const std::size_t kept = text.size();
    text.resize(kept + kPiece);
    const ssize_t got = ::read(file.get(), text.data() + kept, kPiece);
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
  // Those of a job's saves that failed lie in its folder.
  std::vector<std::string> dirs = {arguments.images_dir};
  dirs.push_back(arguments.images_dir);
  find_image(context, dirs.back());
  STASIS_TRY_ASSIGN(const auto logs, find_image_logs(dirs));
  if (logs.empty()) {
    return fail(ErrorCode::kImageIncomplete,
                fmt::format("there are no logs in or beside {}", arguments.images_dir),
                "give the directory of an image, the one that a dump was to make, or a log");
  }
  if (arguments.full) return print_all(context, logs.front());
  json out = json::array();
  for (const ImageLog& log : logs) {
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
  command
      ->add_option(
          "DIR,-D,--images-dir", arguments->images_dir,
          "directory of an image or of a job's images, the work path of a container engine's "
          "checkpoint, or one log")
      ->required()
      ->type_name("DIR");
  command->add_flag("--full", arguments->full, "the whole of the newest one");
  return {command, [arguments](Context& context) { return run_logs(context, *arguments); }, false};
}

}  // namespace stasis::cli
