// How help texts look: every line within 80 columns, what has no short form on lines of its own,
// and examples of each verb.
//
// Functions only; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

namespace stasis::cli {

// What a user writes, and what comes of it.
struct Example {
  std::string_view command;
  std::string_view what;
};

// Three of each verb; those of `stasis` itself without a verb. None of a verb that is not for
// people.
std::span<const Example> examples_of(std::string_view verb);

// What stands for the value of an option in help texts and man pages: "DIR", "disk|none"; empty for
// a flag. None of CLI11's names of types.
std::string value_name(const CLI::Option& option);
// The words that an option chooses from; none if it takes others.
std::vector<std::string> choices_of(const CLI::Option& option);

// What an option may be set to: one of `words`, or a whole number from `least` to `most`.
CLI::Validator one_of(std::vector<std::string> words);
CLI::Validator whole_number(int least, int most);

// "stasis dump [OPTION]... PID DIR"
std::string usage_of(const CLI::App& app);

// `text` on lines of `width` columns, all but the first indented; `used` of the first are taken. A
// word that is longer has a line of its own.
std::string wrap(std::string_view text, std::size_t width, std::size_t indent, std::size_t used);

void set_help_format(CLI::App& app);

}  // namespace stasis::cli
