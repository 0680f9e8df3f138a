#include <CLI/CLI.hpp>

#include "base/version.h"
#include "cli/help.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

json option_json(const CLI::Option& option) {
  json names = json::array();
  for (const std::string& name : option.get_snames())
    names.push_back("-" + name);
  for (const std::string& name : option.get_lnames())
    names.push_back("--" + name);
  const std::vector<std::string> choices = choices_of(option);
  json out = {{"names", names},
              {"text", option.get_description()},
              {"value", value_name(option)},
              {"optional_value", option.get_expected_min() == 0},
              {"many", option.get_expected_max() == CLI::detail::expected_max_vector_size},
              {"required", option.get_required()},
              {"group", option.get_group()}};
  if (option.get_positional()) out["positional"] = option.get_name(true);
  if (!choices.empty()) out["choices"] = choices;
  return out;
}

json command_json(const CLI::App& command) {
  json options = json::array();
  for (const CLI::Option* option : command.get_options())
    if (!option->get_group().empty()) options.push_back(option_json(*option));
  const bool is_verb = command.get_parent() != nullptr;
  json examples = json::array();
  for (const Example& one : examples_of(is_verb ? std::string_view(command.get_name()) : ""))
    examples.push_back({{"command", one.command}, {"text", one.what}});
  return {{"name", command.get_name()},
          {"text", command.get_description()},
          {"footer", command.get_footer()},
          {"examples", examples},
          {"options", options}};
}

}  // namespace

Verb add_describe(CLI::App& app) {
  CLI::App* command = app.add_subcommand("describe-command-line")->group("");
  return {command,
          [&app](Context& context) -> Result<int> {
            json out = command_json(app);
            out["version"] = kVersion;
            out["verbs"] = json::array();
            for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
              if (!verb->get_group().empty()) out["verbs"].push_back(command_json(*verb));
            }
            context.print(out);
            return 0;
          },
          false};
}

}  // namespace stasis::cli
