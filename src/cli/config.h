// Defaults of a site and of a user, from /etc/stasis/config and ~/.config/stasis/config. TOML, as
// CLI11 reads it: a key is an option's long name, a section a verb; a key above all sections holds
// for every verb that has the option. What the command line says wins, then the environment, then
// the user's file, then the site's.
//
// A file that another user could have written is not read. One thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/error.h"

namespace stasis::cli {

struct ConfigFile {
  std::string path;
  bool read = false;
  bool there = true;
  std::string why_not;  // empty if it was read, or is not there
};

struct ConfigValue {
  std::string verb;    // empty: of every verb that has the option
  std::string option;  // "compress"
  std::vector<std::string> words;
  std::string from;  // the file's path
};

struct Configuration {
  std::vector<ConfigFile> files;  // the strongest last
  std::vector<ConfigValue> values;
  std::optional<Error> error;  // what is wrong with a file that was read
};

// Whether one of the files is there.
bool is_configured();

// Reads the files, or that which STASIS_CONFIG names in place of them (none if it is empty). `app`
// has all verbs, unless no file is there.
Configuration read_configuration(const CLI::App& app);

// An environment variable that is stronger than a file's option; nullptr if there is none.
const char* variable_of(const std::string& option);

// Makes `app` take what its command line does not say from `values`, which outlive it.
class ConfiguredDefaults {
 public:
  ConfiguredDefaults(CLI::App& app, const std::vector<ConfigValue>& values);
  // None of them any more.
  void turn_off();
  // The options that have their values from here, "compress"; after the command line was parsed.
  const std::set<std::string>& supplied() const;

 private:
  class Source;
  std::shared_ptr<Source> source_;
};

}  // namespace stasis::cli
