// `stasis config`: which defaults hold here, and where each comes from.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/suggest.h"
#include "cli/config.h"
#include "cli/verbs.h"

extern char** environ;

namespace stasis::cli {
namespace {

using nlohmann::json;

// What the commands read; others that begin so are for tests, for builds, or of other programs.
constexpr auto kVariables = std::to_array<std::string_view>(
    {"STASIS_AGENT", "STASIS_CONFIG", "STASIS_CRIU", "STASIS_LIBCUDA", "STASIS_PRELOAD",
     "STASIS_RING", "STASIS_STATE_DIR"});

// "STASIS_CRIU" and its value, and those of the simulated driver, sorted.
std::vector<std::pair<std::string, std::string>> variables() {
  std::vector<std::pair<std::string, std::string>> out;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) {
    const std::string_view text = *one;
    const std::size_t end = text.find('=');
    if (end == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, end);
    if (name.starts_with("STASIS_SIM_") ||
        std::find(kVariables.begin(), kVariables.end(), name) != kVariables.end())
      out.emplace_back(name, text.substr(end + 1));
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::string words_of(const ConfigValue& value) {
  return fmt::format("{}", fmt::join(value.words, ", "));
}

// A value that the verb would refuse.
std::optional<Error> check_values(CLI::App& app, const Configuration& configuration) {
  for (const ConfigValue& value : configuration.values) {
    for (CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
      if (!value.verb.empty() && verb->get_name() != value.verb) continue;
      CLI::Option* option = verb->get_option_no_throw("--" + value.option);
      if (option == nullptr) continue;
      option->clear();
      try {
        option->add_result(value.words);
        option->run_callback();
      } catch (const CLI::ParseError& error) {
        return Error{ErrorCode::kUsage, fmt::format("{}: {}", value.from, error.what()),
                     fmt::format("mend {}; see `stasis {} --help`", value.from, verb->get_name())};
      }
    }
  }
  return std::nullopt;
}

// A default for all verbs is one only for those that have the option.
bool is_for(const CLI::App& verb, const ConfigValue& value) {
  if (!value.verb.empty()) return value.verb == verb.get_name();
  return verb.get_option_no_throw("--" + value.option) != nullptr;
}

// What a terminal is too narrow for would be cut: where a value is from stands below it then.
std::string fitting_table(std::vector<std::vector<std::string>> lines) {
  const auto width = Terminal::columns();
  const std::string whole = table(lines);
  if (!width) return whole;
  bool fits = true;
  for (std::size_t at = 0; at < whole.size();) {
    const std::size_t end = std::min(whole.find('\n', at), whole.size());
    fits = fits && cli::columns_of(std::string_view(whole).substr(at, end - at)) <= *width;
    at = end + 1;
  }
  if (fits) return whole;
  std::vector<std::string> from;
  for (auto& line : lines) {
    from.push_back(std::move(line.back()));
    line.pop_back();
  }
  const std::string narrow = table(lines);
  std::string out;
  std::size_t at = 0;
  for (const std::string& place : from) {
    const std::size_t end = std::min(narrow.find('\n', at), narrow.size());
    out += (out.empty() ? "" : "\n") + narrow.substr(at, end - at) + "\n  " + place;
    at = end + 1;
  }
  return out;
}

Result<const CLI::App*> find_verb(const CLI::App& app, const std::string& name) {
  std::vector<std::string> known;
  for (const CLI::App* one :
       app.get_subcommands([](const CLI::App* verb) { return !verb->get_group().empty(); })) {
    if (one->get_name() == name) return one;
    known.push_back(one->get_name());
  }
  return fail(ErrorCode::kUsage,
              fmt::format("there is no verb '{}'{}", name, did_you_mean(closest(name, known))),
              "`stasis --help` lists them");
}

Result<int> run_config(Context& context, CLI::App& app, const std::string& verb) {
  const CLI::App* asked = nullptr;
  if (!verb.empty()) {
    STASIS_TRY_ASSIGN(asked, find_verb(app, verb));
  }
  const Configuration configuration = read_configuration(app);
  std::optional<Error> error = configuration.error;
  if (!error) error = check_values(app, configuration);
  if (error) return fail(std::move(*error));
  json files = json::array();
  for (const ConfigFile& file : configuration.files)
    files.push_back({{"path", file.path},
                     {"there", file.there},
                     {"read", file.read},
                     {"reason", file.why_not.empty() ? json() : json(file.why_not)}});
  json values = json::array();
  std::vector<std::vector<std::string>> lines = {{"VERB", "OPTION", "VALUE", "FROM"}};
  for (const ConfigValue& value : configuration.values) {
    if (asked != nullptr && !is_for(*asked, value)) continue;
    const char* variable = variable_of(value.option);
    const char* stronger = variable == nullptr ? nullptr : std::getenv(variable);
    const bool overridden = stronger != nullptr && *stronger != '\0';
    values.push_back({{"verb", value.verb.empty() ? json() : json(value.verb)},
                      {"option", value.option},
                      {"value", value.words},
                      {"from", value.from},
                      {"overridden_by", overridden ? json(variable) : json()}});
    lines.push_back({value.verb.empty() ? "all" : value.verb, "--" + value.option, words_of(value),
                     value.from + (overridden ? fmt::format(" ({} is stronger)", variable) : "")});
  }
  json environment = json::array();
  std::vector<std::vector<std::string>> set = {{"VARIABLE", "VALUE"}};
  for (const auto& [name, text] : variables()) {
    environment.push_back({{"name", name}, {"value", text}});
    set.push_back({name, text});
  }
  if (context.json) {
    context.print(
        {{"ok", true}, {"files", files}, {"values", values}, {"environment", environment}});
    return 0;
  }
  for (const ConfigFile& file : configuration.files) {
    context.terminal.out(fmt::format("{}: {}", file.path,
                                     file.read     ? "read"
                                     : !file.there ? "not there"
                                                   : "not read: " + file.why_not));
  }
  if (lines.size() == 1)
    context.terminal.out("no default is set; those of the program stand in `stasis VERB --help`");
  else
    context.terminal.out_block(fitting_table(std::move(lines)));
  if (set.size() > 1) context.terminal.out_block(table(set));
  return 0;
}

}  // namespace

Verb add_config(CLI::App& app) {
  auto verb = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "config", "show the defaults of this site and user, and where each comes from");
  command->add_option("VERB", *verb, "only those of this verb");
  return {command, [verb, &app](Context& context) { return run_config(context, app, *verb); },
          false};
}

}  // namespace stasis::cli
