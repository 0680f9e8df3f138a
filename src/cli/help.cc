#include "cli/help.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/terminal.h"

namespace stasis::cli {
namespace {

constexpr std::size_t kWidth = 80;
constexpr std::size_t kColumn = 26;  // where the texts begin

bool takes_many(const CLI::Option& option) {
  return option.get_expected_max() >= CLI::detail::expected_max_vector_size;
}

// "  NAME      text", the text on a line of its own if the name is long.
std::string entry(const std::string& name, const std::string& text) {
  std::string out = "  " + name;
  if (out.size() + 2 > kColumn) {
    out += "\n" + std::string(kColumn, ' ');
  } else {
    out.append(kColumn - out.size(), ' ');
  }
  return out + wrap(text, kWidth, kColumn, kColumn) + "\n";
}

// CLI11's own does not know how wide a terminal is.
class Formatter final : public CLI::Formatter {
 public:
  Formatter() { label("Positionals", "Arguments"); }
  std::string make_option(const CLI::Option* option, bool positional) const override {
    if (positional) return entry(option->get_name(true), option->get_description());
    std::string name = make_option_name(option, false);
    if (const auto flag = name.find("{false}"); flag != std::string::npos) name.resize(flag);
    std::string text = option->get_description();
    if (option->get_positional()) {
      text = "the same as " + option->get_name(true);
    } else if (option->get_required()) {
      text += " (required)";
    }
    return entry(name + make_option_opts(option), text);
  }
  // Without what the texts say anyway: what excludes what.
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string value = value_name(*option);
    if (value.empty()) return {};
    if (option->get_expected_min() == 0) value = "[" + value + "]";
    return " " + value;
  }
  std::string make_usage(const CLI::App* app, std::string) const override {
    return "Usage: " + usage_of(*app) + "\n";
  }
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (auto at = text.find("\n\n\n"); at != std::string::npos; at = text.find("\n\n\n", at))
      text.erase(at, 1);
    return text;
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return entry(verb->get_name(), verb->get_description());
  }
  std::string make_description(const CLI::App* app) const override {
    std::string text = app->get_description();
    if (!text.empty() && text.back() != '.') text += '.';
    if (!text.empty())
      text.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(text.front())));
    return wrap(text, kWidth, 0, 0) + "\n";
  }
  std::string make_footer(const CLI::App* app) const override {
    std::string out;
    const bool is_verb = app->get_parent() != nullptr;
    for (const Example& one : examples_of(is_verb ? std::string_view(app->get_name()) : ""))
      out += entry(std::string(one.command), std::string(one.what));
    if (!out.empty()) out = "Examples:\n" + out + "\n";
    return out + CLI::Formatter::make_footer(app);
  }
};

// "ms" behind "17.5", also with marks around them: a line does not end between them.
bool is_unit_of(std::string_view word, std::string_view number) {
  constexpr std::string_view kUnits[] = {"ms",  "s",   "min", "h",    "B",    "KiB",
                                         "MiB", "GiB", "TiB", "MB/s", "GB/s", "%"};
  if (const auto end = word.find_last_not_of(".,;:)"); end != std::string_view::npos)
    word = word.substr(0, end + 1);
  if (number.starts_with('(')) number.remove_prefix(1);
  return !number.empty() && number.find_first_not_of("0123456789.") == std::string_view::npos &&
         std::find(std::begin(kUnits), std::end(kUnits), word) != std::end(kUnits);
}

}  // namespace

std::string wrap(std::string_view text, std::size_t width, std::size_t indent, std::size_t used) {
  std::istringstream words{std::string(text)};
  std::string out;
  std::string word;
  std::string next;
  std::size_t at = used;
  bool more = static_cast<bool>(words >> word);
  for (bool first = true; more; first = false, word = next) {
    more = static_cast<bool>(words >> next);
    if (more && is_unit_of(next, word)) {
      word += " " + next;
      more = static_cast<bool>(words >> next);
    }
    const std::size_t columns = columns_of(word);
    if (!first && at + 1 + columns > width) {
      out += "\n" + std::string(indent, ' ');
      at = indent;
    } else if (!first) {
      out += ' ';
      ++at;
    }
    out += word;
    at += columns;
  }
  return out;
}

std::vector<std::string> choices_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const std::size_t begin = type.find(":{");
  if (begin == std::string::npos || !type.ends_with('}')) return {};
  return CLI::detail::split(type.substr(begin + 2, type.size() - begin - 3), ',');
}

std::string value_name(const CLI::Option& option) {
  if (option.get_type_size() == 0) return {};
  const std::string type = option.get_type_name();
  const std::size_t choices = type.find(":{");
  if (choices == std::string::npos) return type;
  return fmt::format("{}", fmt::join(choices_of(option), "|"));
}

CLI::Validator one_of(std::vector<std::string> words) {
  const std::string known = fmt::format("{{{}}}", fmt::join(words, ","));
  return CLI::Validator(
      [words = std::move(words)](const std::string& word) {
        if (std::find(words.begin(), words.end(), word) != words.end()) return std::string();
        const auto last = std::prev(words.end());
        const std::string rest = fmt::to_string(fmt::join(words.begin(), last, ", "));
        return fmt::format("'{}' is not allowed; use {}{}{}", word, rest,
                           rest.empty() ? "" : " or ", *last);
      },
      known);
}

CLI::Validator whole_number(int least, int most) {
  return CLI::Validator(
      [least, most](const std::string& word) {
        int number = 0;
        const char* const end = word.data() + word.size();
        const auto [last, error] = std::from_chars(word.data(), end, number);
        if (error == std::errc() && last == end && number >= least && number <= most)
          return std::string();
        return fmt::format("'{}' is no whole number from {} to {}", word, least, most);
      },
      "");
}

std::string usage_of(const CLI::App& app) {
  const bool is_verb = app.get_parent() != nullptr;
  std::string out = is_verb ? app.get_parent()->get_name() + " " + app.get_name() : app.get_name();
  out += " [OPTION]...";
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_positional()) {
      if (option->get_required())
        out += fmt::format(" {} {}", option->get_name(), value_name(*option));
      continue;
    }
    const std::string word = option->get_name(true) + (takes_many(*option) ? "..." : "");
    out += option->get_required() ? " " + word : " [" + word + "]";
  }
  return is_verb ? out : out + " VERB [ARGUMENT]...";
}

void set_help_format(CLI::App& app) { app.formatter(std::make_shared<Formatter>()); }

}  // namespace stasis::cli
