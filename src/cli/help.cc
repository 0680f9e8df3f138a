#include "cli/help.h"

#include <memory>
#include <sstream>
#include <string>

#include <CLI/CLI.hpp>

namespace stasis::cli {
namespace {

constexpr std::size_t kWidth = 80;
constexpr std::size_t kColumn = 26;  // where the texts begin

// Words of `text` on lines of kWidth columns, all but the first indented; `used` of the first are
// taken.
std::string wrap(const std::string& text, std::size_t indent, std::size_t used) {
  std::istringstream words(text);
  std::string out;
  std::string word;
  std::size_t at = used;
  for (bool first = true; words >> word; first = false) {
    if (!first && at + 1 + word.size() > kWidth) {
      out += "\n" + std::string(indent, ' ');
      at = indent;
    } else if (!first) {
      out += ' ';
      ++at;
    }
    out += word;
    at += word.size();
  }
  return out + "\n";
}

// "  NAME      text", the text on a line of its own if the name is long.
std::string entry(const std::string& name, const std::string& text) {
  std::string out = "  " + name;
  if (out.size() + 2 > kColumn) {
    out += "\n" + std::string(kColumn, ' ');
  } else {
    out.append(kColumn - out.size(), ' ');
  }
  return out + wrap(text, kColumn, kColumn);
}

// CLI11's own does not know how wide a terminal is.
class Formatter final : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool positional) const override {
    std::string name = make_option_name(option, positional);
    if (const auto flag = name.find("{false}"); flag != std::string::npos) name.resize(flag);
    const bool required = option->get_required() && !positional;
    return entry(positional ? name : name + make_option_opts(option),
                 make_option_desc(option) + (required ? " (required)" : ""));
  }
  // Without what the texts say anyway: the words to choose from, what excludes what.
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0) return {};
    const std::string type = option->get_type_name();
    const bool many = option->get_expected_max() == CLI::detail::expected_max_vector_size;
    if (type.empty() || type.starts_with(":{")) return many ? " ..." : "";
    return " " + type.substr(0, type.find(":{")) + (many ? " ..." : "");
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return entry(verb->get_name(), verb->get_description());
  }
  std::string make_description(const CLI::App* app) const override {
    return wrap(app->get_description(), 0, 0);
  }
};

}  // namespace

void set_help_format(CLI::App& app) { app.formatter(std::make_shared<Formatter>()); }

}  // namespace stasis::cli
