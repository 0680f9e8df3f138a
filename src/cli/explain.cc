#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstring>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/suggest.h"
#include "cli/verbs.h"
#include "criu/criu_log.h"
#include "driver/driver_errors.h"
#include "operations/operations.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

json error_json(const ErrorInfo& info) {
  return {{"code", info.name},
          {"exit_status", info.exit_status},
          {"meaning", info.meaning},
          {"causes", info.causes},
          {"remedy", info.remedy}};
}

json answer_json(const DriverAnswer& answer) {
  json action;  // null: any
  if (answer.action) action = action_name(*answer.action);
  return {{"number", answer.number},
          {"action", action},
          {"code", error_code_name(answer.code)},
          {"meaning", answer.meaning},
          {"remedy", answer.remedy}};
}

json rule_json(const CriuRule& rule) {
  return {{"line", {rule.first, rule.second}},
          {"code", error_code_name(rule.code)},
          {"meaning", rule.meaning},
          {"remedy", rule.remedy}};
}

json obstacle_json(const ObstacleInfo& info) {
  return {{"id", info.id}, {"meaning", info.meaning}};
}

json check_json(const RestoreCheckInfo& info) {
  return {{"id", info.id}, {"meaning", info.meaning}};
}

constexpr std::pair<std::string_view, int> kDriverNames[] = {
#define STASIS_CUDA_RESULT(name, number) {#name, number},
#include "abi/cuda_results.inc"
#undef STASIS_CUDA_RESULT
};

// What the CUDA runtime calls answers of the driver, by the driver's numbers (driver_types.h; since
// CUDA 10.1 they are the runtime's too). Those that a program whose GPU was saved or taken may see.
constexpr std::pair<std::string_view, int> kRuntimeNames[] = {
    {"cudaErrorInvalidValue", 1},
    {"cudaErrorMemoryAllocation", 2},
    {"cudaErrorInitializationError", 3},
    {"cudaErrorCudartUnloading", 4},
    {"cudaErrorDevicesUnavailable", 46},
    {"cudaErrorNoDevice", 100},
    {"cudaErrorInvalidDevice", 101},
    {"cudaErrorDeviceUninitialized", 201},
    {"cudaErrorNoKernelImageForDevice", 209},
    {"cudaErrorECCUncorrectable", 214},
    {"cudaErrorOperatingSystem", 304},
    {"cudaErrorInvalidResourceHandle", 400},
    {"cudaErrorIllegalState", 401},
    {"cudaErrorNotReady", 600},
    {"cudaErrorIllegalAddress", 700},
    {"cudaErrorLaunchTimeout", 702},
    {"cudaErrorContextIsDestroyed", 709},
    {"cudaErrorLaunchFailure", 719},
    {"cudaErrorNotPermitted", 800},
    {"cudaErrorNotSupported", 801},
    {"cudaErrorSystemNotReady", 802},
    {"cudaErrorSystemDriverMismatch", 803},
    {"cudaErrorMpsConnectionFailed", 805},
    {"cudaErrorUnknown", 999},
};
static_assert(std::all_of(std::begin(kRuntimeNames), std::end(kRuntimeNames),
                          [](const auto& one) {
                            return std::any_of(
                                std::begin(kDriverNames), std::end(kDriverNames),
                                [&](const auto& two) { return two.second == one.second; });
                          }),
              "each of the runtime's has a name of the driver's");

template <typename Entry>
json all_of(std::span<const Entry> entries, json (*to_json)(const Entry&)) {
  json out = json::array();
  for (const Entry& entry : entries)
    out.push_back(to_json(entry));
  return out;
}

std::string details(const ErrorInfo& info) {
  std::string out =
      fmt::format("{} (exit status {})\n  what      {}", info.name, info.exit_status, info.meaning);
  if (!info.causes.empty()) out += fmt::format("\n  causes    {}", info.causes);
  if (!info.remedy.empty()) out += fmt::format("\n  remedy    {}", info.remedy);
  return out;
}

int list_all(Context& context) {
  if (context.json) {
    context.print(
        {{"ok", true},
         {"errors", all_of(error_catalogue(), error_json)},
         {"driver", all_of(driver_answers(), answer_json)},
         {"criu", all_of(criu_rules(), rule_json)},
         {"obstacles", all_of(std::span<const ObstacleInfo>(kObstacles), obstacle_json)},
         {"checks", all_of(std::span<const RestoreCheckInfo>(kRestoreChecks), check_json)}});
    return 0;
  }
  std::vector<std::vector<std::string>> lines = {{"CODE", "STATUS", "MEANING"}};
  for (const ErrorInfo& info : error_catalogue())
    lines.push_back(
        {std::string(info.name), std::to_string(info.exit_status), std::string(info.meaning)});
  context.terminal.out_block(table(lines));
  return 0;
}

// What `stasis run` ends with besides the errors' own; empty if with no such status.
std::string meaning_for_run(int status) {
  constexpr int kSaved = 75;
  constexpr int kCannotRun = 126;
  constexpr int kNoCommand = 127;
  constexpr int kSignal = 128;
  if (status == kSaved)
    return "the job was saved and has ended, or TERM ended it before it ran; the same command line "
           "starts it again";
  if (status == kCannotRun) return "the command cannot be run";
  if (status == kNoCommand) return "there is no such command";
  if (status <= kSignal || status >= kSignal + NSIG) return {};
  const char* name = ::sigabbrev_np(status - kSignal);
  return fmt::format("signal {}{} ended the command{}", status - kSignal,
                     name == nullptr ? "" : fmt::format(" (SIG{})", name),
                     status - kSignal == SIGKILL ? ", or `stasis dump` did" : "");
}

struct Explanation {
  json found = json::array();  // empty: nothing is known
  std::string text;

  void add(json one, const std::string& lines) {
    found.push_back(std::move(one));
    text += (text.empty() ? "" : "\n") + lines;
  }
};

// An error, an obstacle or a check.
Explanation about_id(std::string_view id) {
  Explanation about;
  for (const ErrorInfo& info : error_catalogue()) {
    if (info.name != id) continue;
    about.add(error_json(info), details(info));
    return about;
  }
  for (const ObstacleInfo& info : kObstacles) {
    if (info.id != id) continue;
    about.add(obstacle_json(info), fmt::format("{}\n  what      {}", info.id, info.meaning));
    return about;
  }
  for (const RestoreCheckInfo& info : kRestoreChecks) {
    if (info.id != id) continue;
    about.add(check_json(info),
              fmt::format("{}\n  what      a check of `stasis inspect` and restore: {}", info.id,
                          info.meaning));
    return about;
  }
  return about;
}

// An answer of the driver, for each call that it means something else at.
Explanation about_answer(int number, std::string_view asked) {
  Explanation about;
  const auto tell = [&](const DriverAnswer& answer) {
    const auto words = [](std::string_view form) {
      return fmt::format(fmt::runtime(form), fmt::arg("pid", "PID"), fmt::arg("action", "CALL"));
    };
    json one = answer_json(answer);
    one["meaning"] = words(answer.meaning);
    one["remedy"] = words(answer.remedy);
    about.add(
        std::move(one),
        fmt::format("{} of the driver{}: {}\n  what      {}\n  remedy    {}", asked,
                    answer.action ? fmt::format(" at {}", action_name(*answer.action)) : "",
                    error_code_name(answer.code), words(answer.meaning), words(answer.remedy)));
  };
  const auto answers = driver_answers();
  for (const DriverAnswer& answer : answers)
    if (answer.number == number) tell(answer);
  if (about.found.empty()) tell(answers.back());
  return about;
}

// An answer of the driver by its name, or by the CUDA runtime's, in any case of letters.
Explanation about_named_answer(const std::string& name) {
  const std::string lower = CLI::detail::to_lower(name);
  const auto is_named = [&](const auto& entry) {
    return entry.second != 0 && CLI::detail::to_lower(std::string(entry.first)) == lower;
  };
  const auto* driver = std::find_if(std::begin(kDriverNames), std::end(kDriverNames), is_named);
  if (driver != std::end(kDriverNames)) return about_answer(driver->second, driver->first);
  const auto* runtime = std::find_if(std::begin(kRuntimeNames), std::end(kRuntimeNames), is_named);
  if (runtime == std::end(kRuntimeNames)) return {};
  driver = std::find_if(std::begin(kDriverNames), std::end(kDriverNames),
                        [&](const auto& entry) { return entry.second == runtime->second; });
  return about_answer(runtime->second, fmt::format("{} ({})", driver->first, runtime->first));
}

// What a number can be: an answer of the driver, and an exit status of ours.
Explanation about_number(int number) {
  Explanation about;
  if (number > 0) about = about_answer(number, std::to_string(number));
  std::string codes;
  for (const ErrorInfo& info : error_catalogue()) {
    if (info.exit_status != number) continue;
    codes += fmt::format("\n  {:<22} {}", info.name, info.meaning);
    about.found.push_back(error_json(info));
  }
  if (!codes.empty())
    about.text += fmt::format("{}{} as an exit status of stasis:{}", about.text.empty() ? "" : "\n",
                              number, codes);
  if (const std::string meaning = meaning_for_run(number); !meaning.empty())
    about.add({{"verb", "run"}, {"exit_status", number}, {"meaning", meaning}},
              fmt::format("{} as an exit status of stasis run: {}", number, meaning));
  return about;
}

// A line of CRIU's log, or a log.
Explanation about_line(const std::string& line) {
  Explanation about;
  auto diagnosis = CriuLog::parse(line).diagnosis;
  if (!diagnosis) diagnosis = diagnose_criu_line(line);
  if (!diagnosis) return about;
  about.add(to_json(*diagnosis),
            fmt::format("{}: {}\n  what      {}\n  remedy    {}", error_code_name(diagnosis->code),
                        diagnosis->line, diagnosis->meaning, diagnosis->remedy));
  return about;
}

// A whole message of ours ends with its code.
std::string code_of_message(const std::string& what) {
  const std::size_t bracket = what.rfind(" [");
  if (bracket == std::string::npos || what.back() != ']') return what;
  const std::string code = what.substr(bracket + 2, what.size() - bracket - 3);
  const auto catalogue = error_catalogue();
  const bool is_code = std::any_of(catalogue.begin(), catalogue.end(),
                                   [&](const ErrorInfo& info) { return info.name == code; });
  return is_code ? code : what;
}

tl::unexpected<Error> unknown_word(const std::string& what) {
  std::vector<std::string> known;
  for (const ErrorInfo& info : error_catalogue())
    known.emplace_back(info.name);
  for (const ObstacleInfo& info : kObstacles)
    known.emplace_back(info.id);
  for (const RestoreCheckInfo& info : kRestoreChecks)
    known.emplace_back(info.id);
  return fail(ErrorCode::kUsage,
              fmt::format("'{}' is unknown{}", what,
                          did_you_mean(closest(CLI::detail::to_lower(what), known))),
              "give a code (`stasis explain` lists them), the id of an obstacle or of a check, the "
              "number or name of an answer of the driver, or a line of CRIU's log");
}

Result<int> run_explain(Context& context, const std::vector<std::string>& words) {
  if (words.empty()) return list_all(context);
  const std::string said = fmt::format("{}", fmt::join(words, " "));
  const std::string what = code_of_message(CLI::detail::trim_copy(said));
  Explanation about = about_id(CLI::detail::to_lower(what));
  int number = 0;
  const auto [end, error] = std::from_chars(what.data(), what.data() + what.size(), number);
  if (error == std::errc() && end == what.data() + what.size()) {
    about = about_number(number);
    if (about.found.empty()) {
      return fail(ErrorCode::kUsage,
                  fmt::format("{} is neither an answer of the driver nor an exit status", number),
                  "CUDA's documentation has the meaning of each CUresult");
    }
  }
  if (about.found.empty()) about = about_named_answer(what);
  if (about.found.empty()) about = about_line(what);
  if (about.found.empty()) return unknown_word(what);
  if (context.json)
    context.print({{"ok", true}, {"found", std::move(about.found)}});
  else
    context.terminal.out_block(about.text);
  return 0;
}

}  // namespace

Verb add_explain(CLI::App& app) {
  auto words = std::make_shared<std::vector<std::string>>();
  CLI::App* command = app.add_subcommand(
      "explain",
      "say what an error means and what to do: its code, the id of an obstacle or of a check, "
      "the number or name of an answer of the driver, also the CUDA runtime's name, or a line of "
      "CRIU's log; without any, list the codes");
  command->add_option(
      "WHAT", *words,
      "e.g. image-corrupt, 801, CUDA_ERROR_NOT_SUPPORTED, cudaErrorMemoryAllocation, \"Connected "
      "TCP socket\"");
  return {command, [words](Context& context) { return run_explain(context, *words); }, false};
}

}  // namespace stasis::cli
