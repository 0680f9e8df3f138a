#include "cli/config.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/printable.h"
#include "base/suggest.h"
#include "proc/trusted_path.h"

namespace stasis::cli {
namespace {

constexpr const char* kSiteFile = "/etc/stasis/config";
constexpr std::size_t kMostBytes = std::size_t{64} << 10;

// What belongs to one call and cannot be a default.
constexpr auto kOfOneCall = std::to_array<std::string_view>(
    {"help", "version", "json", "images-dir", "name", "output", "inherit-fd", "all", "full",
     // The user's word on one program.
     "attach", "graphs-are-safe", "watch-graphs", "ignore-obstacles"});

bool can_be_default(const CLI::Option& option) {
  return !option.get_group().empty() && !option.get_positional() && !option.get_lnames().empty() &&
         std::find(kOfOneCall.begin(), kOfOneCall.end(), option.get_lnames().front()) ==
             kOfOneCall.end();
}

const CLI::Option* find_option(const CLI::App& app, const std::string& name) {
  const CLI::Option* option = app.get_option_no_throw("--" + name);
  return option != nullptr && can_be_default(*option) ? option : nullptr;
}

std::vector<const CLI::App*> verbs_of(const CLI::App& app) {
  std::vector<const CLI::App*> out;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!verb->get_group().empty()) out.push_back(verb);
  return out;
}

std::vector<std::string> paths() {
  if (const char* named = std::getenv("STASIS_CONFIG"))
    return *named == '\0' ? std::vector<std::string>() : std::vector<std::string>{named};
  std::vector<std::string> out = {kSiteFile};
  const char* folder = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  if (folder != nullptr && *folder == '/')
    out.push_back(std::string(folder) + "/stasis/config");
  else if (home != nullptr && *home == '/')
    out.push_back(std::string(home) + "/.config/stasis/config");
  return out;
}

// The content of a file that only root and this user can have written; `file` says why not.
std::string read_trusted(ConfigFile& file) {
  std::error_code failed;
  const std::string absolute = std::filesystem::absolute(file.path, failed).string();
  // Also where this user may not look: another user's home.
  if (::access(absolute.c_str(), F_OK) != 0) {
    file.there = false;
    return {};
  }
  const proc::TrustedPath judged = proc::judge_path(absolute);
  if (!judged.why_not.empty()) {
    file.why_not = judged.why_not;
    return {};
  }
  const auto opened = open_file(AT_FDCWD, judged.path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat info = {};
  if (!opened || ::fstat(opened->get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    file.why_not = opened ? "it is no regular file" : opened.error().message;
    return {};
  }
  const auto content = read_file(*opened, judged.path, kMostBytes);
  if (!content) {
    file.why_not = content.error().message;
    return {};
  }
  file.read = true;
  return *content;
}

Error unknown(const std::string& path, const std::string& what, const std::string& word,
              const std::vector<std::string>& known) {
  return {ErrorCode::kUsage,
          fmt::format("{}: {}{}", path, what, did_you_mean(closest(word, known))),
          fmt::format("mend {}, or set STASIS_CONFIG to nothing for one call without it", path)};
}

// "PATH:LINE" where a line of the file begins with the name in its section, else the path.
std::string place_of(const std::string& path, const std::string& text,
                     const CLI::ConfigItem& item) {
  std::istringstream lines(text);
  const std::string section = fmt::format("{}", fmt::join(item.parents, "."));
  std::string current;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::size_t begin = line.find_first_not_of(" \t\"'");
    if (begin == std::string::npos) continue;
    if (line[begin] == '[') {
      current = line.substr(begin + 1, line.find(']', begin) - begin - 1);
    } else if (current == section && line.compare(begin, item.name.size(), item.name) == 0 &&
               (begin + item.name.size() == line.size() ||
                std::string_view(" \t=\"'").find(line[begin + item.name.size()]) !=
                    std::string_view::npos)) {
      return fmt::format("{}:{}", path, number);
    }
  }
  return path;
}

// CLI11 takes any line for a key.
bool is_key(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
  });
}

Error no_toml(const std::string& place, const std::string& path, std::string_view line) {
  return {ErrorCode::kUsage,
          fmt::format("{}: '{}' is no line of TOML: one is KEY = VALUE or [VERB]", place,
                      shortened(line, 60)),
          fmt::format("mend {}, or set STASIS_CONFIG to nothing for one call without it", path)};
}

// Nothing if there is such an option, of that verb or, without one, of any.
std::optional<Error> check(const CLI::App& app, const std::string& path,
                           const CLI::ConfigItem& item) {
  const auto verbs = verbs_of(app);
  std::vector<std::string> known;
  if (item.parents.empty()) {
    for (const CLI::App* verb : verbs) {
      if (find_option(*verb, item.name) != nullptr) return std::nullopt;
      for (const CLI::Option* option : verb->get_options())
        if (can_be_default(*option)) known.push_back(option->get_lnames().front());
    }
    return unknown(path, fmt::format("no verb has an option '{}' to set", item.name), item.name,
                   known);
  }
  const std::string section = fmt::format("{}", fmt::join(item.parents, "."));
  const auto verb = std::find_if(verbs.begin(), verbs.end(),
                                 [&](const CLI::App* one) { return one->get_name() == section; });
  if (verb == verbs.end()) {
    for (const CLI::App* one : verbs)
      known.push_back(one->get_name());
    return unknown(path, fmt::format("there is no verb '{}'", section), section, known);
  }
  if (find_option(**verb, item.name) != nullptr) return std::nullopt;
  for (const CLI::Option* option : (*verb)->get_options())
    if (can_be_default(*option)) known.push_back(option->get_lnames().front());
  return unknown(path, fmt::format("'{}' has no option '{}' to set", section, item.name), item.name,
                 known);
}

}  // namespace

bool is_configured() {
  const auto all = paths();
  return std::any_of(all.begin(), all.end(),
                     [](const std::string& path) { return ::access(path.c_str(), F_OK) == 0; });
}

Configuration read_configuration(const CLI::App& app) {
  Configuration out;
  for (const std::string& path : paths()) {
    ConfigFile file{path, false, true, {}};
    const std::string content = read_trusted(file);
    std::istringstream text(content);
    out.files.push_back(file);
    if (!file.read) continue;
    for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(text)) {
      if (item.name == "++" || item.name == "--") continue;  // a section begins, or ends
      if (!is_key(item.name)) {
        if (!out.error) out.error = no_toml(place_of(path, content, item), path, item.name);
        continue;
      }
      if (auto error = check(app, place_of(path, content, item), item)) {
        if (!out.error) out.error = std::move(error);
        continue;
      }
      ConfigValue value{item.parents.empty() ? "" : item.parents.front(), item.name, item.inputs,
                        path};
      // The user's in place of the site's.
      std::erase_if(out.values, [&](const ConfigValue& one) {
        return one.verb == value.verb && one.option == value.option;
      });
      out.values.push_back(std::move(value));
    }
  }
  return out;
}

const char* variable_of(const std::string& option) {
  if (option == "ring") return "STASIS_RING";
  if (option == "criu") return "STASIS_CRIU";
  return nullptr;
}

// CLI11 asks it once the command line is known, and takes from it what that did not say.
class ConfiguredDefaults::Source final : public CLI::ConfigTOML {
 public:
  Source(const CLI::App& app, const std::vector<ConfigValue>& values)
      : app_(app), values_(values) {}

  void turn_off() { off_ = true; }

  std::vector<CLI::ConfigItem> from_config(std::istream&) const override {
    std::vector<CLI::ConfigItem> out;
    const auto chosen = app_.get_subcommands();
    if (off_ || chosen.empty()) return out;
    const CLI::App& verb = *chosen.front();
    for (const ConfigValue& value : values_) {
      const CLI::Option* option = find_option(verb, value.option);
      if (option == nullptr || !(value.verb.empty() || value.verb == verb.get_name())) continue;
      if (!fits(*option) || is_set(variable_of(value.option))) continue;
      // A verb's own section says more than what holds for all.
      const bool own = std::any_of(values_.begin(), values_.end(), [&](const ConfigValue& other) {
        return value.verb.empty() && other.verb == verb.get_name() && other.option == value.option;
      });
      if (own) continue;
      CLI::ConfigItem item;
      item.parents = {verb.get_name()};
      item.name = value.option;
      item.inputs = value.words;
      out.push_back(std::move(item));
      supplied_.insert(value.option);
    }
    return out;
  }

  const std::set<std::string>& supplied() const { return supplied_; }

 private:
  // Neither excluded by what the command line says, nor without what it needs there.
  static bool fits(const CLI::Option& option) {
    const auto given = [](const CLI::Option* other) { return other->count() > 0; };
    const auto needs = option.get_needs();
    const auto excludes = option.get_excludes();
    return std::all_of(needs.begin(), needs.end(), given) &&
           std::none_of(excludes.begin(), excludes.end(), given);
  }
  static bool is_set(const char* variable) {
    const char* value = variable == nullptr ? nullptr : std::getenv(variable);
    return value != nullptr && *value != '\0';
  }

  const CLI::App& app_;
  const std::vector<ConfigValue>& values_;
  bool off_ = false;
  mutable std::set<std::string> supplied_;
};

ConfiguredDefaults::ConfiguredDefaults(CLI::App& app, const std::vector<ConfigValue>& values)
    : source_(std::make_shared<Source>(app, values)) {
  // CLI11 wants a file, which read_configuration() has read already.
  app.set_config("--configured-defaults", "/dev/null")->group("")->configurable(false);
  app.config_formatter(source_);
}

void ConfiguredDefaults::turn_off() { source_->turn_off(); }

const std::set<std::string>& ConfiguredDefaults::supplied() const { return source_->supplied(); }

}  // namespace stasis::cli
