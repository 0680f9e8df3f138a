#include "cli/run_job.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "base/channel.h"
#include "image/image_reader.h"

namespace stasis::cli {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

// "90", "90s", "10m", "2h", "500ms".
milliseconds parse_duration(const std::string& option, const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  constexpr std::uint64_t kMost = 1'000'000'000;
  std::uint64_t factor = 0;
  if (unit == "ms") factor = 1;
  if (unit == "s" || unit.empty()) factor = 1000;
  if (unit == "m") factor = 60'000;
  if (unit == "h") factor = 3'600'000;
  if (error != std::errc() || factor == 0 || value == 0 || value > kMost / factor) {
    throw CLI::ValidationError(
        option,
        fmt::format("'{}' is no duration; write e.g. 90s, 10m or 2h, 11 days at most", text));
  }
  return milliseconds(value * factor);
}

// "TERM", "SIGTERM", "15"; 0 if it is none that can be taken.
int parse_signal(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  if (text.starts_with("SIG")) text.erase(0, 3);
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGXCPU}) {
    if (text == ::sigabbrev_np(number) || text == std::to_string(number)) return number;
  }
  return 0;
}

json failed(const Context& context, const Error& error) {
  return {{"error", job::error_to_json(error)}, {"notes", context.notes}};
}

void add_report(json& result, const Context& context, const Report& report) {
  result["seconds"] = report.total.count();
  if (report.standstill) result["standstill"] = report.standstill->count();
  result["notes"] = context.notes;
}

json save(Context& context, Driver& driver, const json& request, const job::StreamEnds& streams) {
  DumpOptions options;
  options.images_dir = request.at("images_dir").get<std::string>();
  options.after = request.at("end").get<bool>() ? AfterDump::kKill : AfterDump::kRunning;
  options.job.emplace();
  options.job->command = request.at("command").get<std::vector<std::string>>();
  for (const UniqueFd& stream : streams) {
    auto name = job::pipe_name(stream);
    if (!name) return failed(context, name.error());
    options.job->streams.push_back(std::move(*name));
  }
  context.interrupt.set_time_limit(milliseconds(request.at("limit_ms").get<std::int64_t>()));
  const Pid root{request.at("root").get<int>()};
  auto report = dump(context.environment(driver), root, options);
  if (!report) return failed(context, report.error());
  json result = {{"image_bytes", report->image_bytes}};
  add_report(result, context, *report);
  return result;
}

json bring_back(Context& context, Driver& driver, const json& request,
                const job::StreamEnds& streams) {
  RestoreOptions options;
  options.images_dir = request.at("images_dir").get<std::string>();
  auto image = ImageReader::open(options.images_dir);
  if (!image) return failed(context, image.error());
  const auto& job = image->manifest().job;
  for (std::size_t i = 0; job && i < job->streams.size() && i < streams.size(); ++i)
    options.inherit.push_back({job->streams[i], &streams.at(i)});
  options.on_standing = job::number_from_first;
  auto report = restore(context.environment(driver), options);
  if (!report) return failed(context, report.error());
  json result = {{"root", report->root.value}};
  add_report(result, context, *report);
  return result;
}

// In a process of its own, in the job's namespaces.
json work(const json& request, const job::StreamEnds& streams) {
  Terminal nobody;
  Interrupt interrupt;
  Context context{nobody, interrupt};
  auto driver = context.load_moving_driver();
  if (!driver) return failed(context, driver.error());
  if ((*driver)->info().simulated) {
    context.notes.push_back("this is the simulated GPU (" + (*driver)->info().library + ")");
  }
  const std::string what = request.value("op", "");
  if (what == "dump") return save(context, **driver, request, streams);
  if (what == "restore") return bring_back(context, **driver, request, streams);
  auto report = recover(context.environment(**driver), Pid{request.at("root").get<int>()});
  if (!report) return failed(context, report.error());
  if (report->error) return failed(context, *report->error);
  return {{"notes", context.notes}};
}

// A message holds so much and no more.
json bounded(json result) {
  constexpr std::size_t kRoom = Channel::kMostBytes / 2;
  if (result.dump(-1, ' ', false, json::error_handler_t::replace).size() <= kRoom) return result;
  result.erase("notes");
  if (result.contains("error")) {
    for (const char* part : {"message", "remedy"}) {
      auto text = result["error"].value(part, "");
      text.resize(std::min(text.size(), kRoom / 8));
      result["error"][part] = text;
    }
  }
  return result;
}

}  // namespace

void add_job_options(CLI::App& command, RunArguments& arguments) {
  constexpr const char* kGroup = "Options for jobs";
  job::RunOptions& job = arguments.job;
  auto* dir = command
                  .add_option("-D,--images-dir", job.images_dir,
                              "directory for the images of this one job; the newest there is "
                              "restored instead of starting COMMAND")
                  ->type_name("DIR")
                  ->group(kGroup);
  command
      .add_option_function<std::string>(
          "--every",
          [&job](const std::string& text) { job.every = parse_duration("--every", text); },
          "save it so often, and let it go on; e.g. 10m [never]")
      ->type_name("TIME")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--on-signal", arguments.signals,
                  "signals that save it and are not passed on: USR1 and USR2 let it go on, others "
                  "end it [TERM,USR1]")
      ->delimiter(',')
      ->expected(1)
      ->type_name("SIGNAL,...")
      ->needs(dir)
      ->group(kGroup);
  command.add_option("--keep", job.keep, "so many complete images, the newest [2]")
      ->check(CLI::Range(1, 1000))
      ->type_name("N")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option_function<std::string>(
          "--grace",
          [&job](const std::string& text) { job.grace = parse_duration("--grace", text); },
          "how long a save before its end may take; then it gets the signal itself [120s]")
      ->type_name("TIME")
      ->needs(dir)
      ->group(kGroup);
  command
      .add_option("--exit-code", job.exit_code,
                  "the exit status after a save that has ended it [75]")
      ->check(CLI::Range(0, 255))
      ->type_name("N")
      ->needs(dir)
      ->group(kGroup);
}

Result<job::Outcome> run_job(Context& context, RunArguments& arguments,
                             const std::string& preload) {
  job::RunOptions& options = arguments.job;
  for (const std::string& name : arguments.signals) {
    const int number = parse_signal(name);
    if (number == 0) {
      return fail(ErrorCode::kUsage, fmt::format("'{}' is no signal that can ask for a save", name),
                  "--on-signal takes HUP, INT, QUIT, USR1, USR2, ALRM, TERM and XCPU");
    }
    options.signals.insert(number);
  }
  options.preload = preload;
  const auto tell = [&](const std::string& text) { context.terminal.note(text); };
  return job::run(
      options,
      [](const json& request, const job::StreamEnds& streams) {
        return bounded(work(request, streams));
      },
      tell);
}

}  // namespace stasis::cli
