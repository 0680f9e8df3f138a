// SPDX-License-Identifier: GPL-2.0-or-later
#include "criu_api.h"

#include <cstring>

#include <fmt/format.h>

extern "C" {
// Of criu's own program, which is linked so that plugins see them.
[[gnu::weak, gnu::format(printf, 2, 3)]] void print_on_level(unsigned level, const char* format,
                                                             ...);
[[gnu::weak]] int criu_get_image_dir(void);
[[gnu::weak]] int add_inventory_plugin(const char* name);
[[gnu::weak]] bool check_and_remove_inventory_plugin(const char* name, std::size_t length);
// The first since 4.1, the other in 4.0.
[[gnu::weak]] void set_compel_interrupt_only_mode(void);
[[gnu::weak]] void dont_use_freeze_cgroup(void);
// Of CRIU's development branch (checkpoint-restore/criu#3138): argv[0] is a made-up name, then each
// option as --PLUGIN.NAME[=VALUE], those of other plugins too. All of it stays CRIU's.
[[gnu::weak]] int criu_plugin_get_options(int* argc, char*** argv);
// struct cr_options of criu/include/cr_options.h. Its first member has been the state to leave the
// tasks in for as long as there have been plugins for devices; nothing else of it is looked at.
struct cr_options {  // NOLINT(readability-identifier-naming): CRIU's name
  int final_state;
};
[[gnu::weak]] extern cr_options opts;
}

namespace stasis::plugin {
namespace {

// criu/include/log-levels.h
enum Level : unsigned { kError = 1, kWarning = 2, kInfo = 3 };

// criu/include/pid.h
enum TaskState { kAlive = 1, kDead = 2, kStopped = 3 };

void log(Level level, const std::string& text) {
  if (print_on_level == nullptr) return;
  print_on_level(level, "%s%s: %s\n", level == kError ? "Error (plugin): " : "", kName,
                 text.c_str());
}

}  // namespace

void log_info(const std::string& text) { log(kInfo, text); }
void log_warning(const std::string& text) { log(kWarning, "Warn: " + text); }

void log_error(const std::string& doing, const Error& error) {
  std::string driver;
  if (error.driver && error.message.find(error.driver->name) == std::string::npos) {
    driver = fmt::format(" (driver: {} {}, \"{}\")", error.driver->name, error.driver->number,
                         error.driver->text);
  }
  log(kError, fmt::format("{}: {}{} [{}]{}{}", doing, error.to_string(), driver,
                          error_code_name(error.code),
                          error.remedy.empty() ? "" : "; what to do: ", error.remedy));
}

std::optional<int> image_directory() {
  if (criu_get_image_dir == nullptr) return std::nullopt;
  const int fd = criu_get_image_dir();
  if (fd < 0) return std::nullopt;
  return fd;
}

Result<std::optional<std::string>> plugin_option(std::string_view name) {
  int count = 0;
  char** words = nullptr;
  std::optional<std::string> value;
  if (criu_plugin_get_options == nullptr || criu_plugin_get_options(&count, &words) != 0) {
    return value;
  }
  const std::string option = fmt::format("--{}.{}", kName, name);
  for (int i = 1; i < count; ++i) {
    std::string_view word = words[i];
    if (!word.starts_with(option)) continue;
    word.remove_prefix(option.size());
    if (word.starts_with('=')) value = word.substr(1);
    if (word.empty()) {
      return fail(ErrorCode::kUsage, fmt::format("{} needs a value", option.substr(2)),
                  fmt::format("write --plugin-option {}=VALUE", option.substr(2)));
    }
  }
  return value;
}

bool enter_inventory() {
  return add_inventory_plugin == nullptr || add_inventory_plugin(kName) == 0;
}

Inventory probe_inventory() {
  if (check_and_remove_inventory_plugin == nullptr) return Inventory::kUnknown;
  // Of an image without an inventory CRIU says that it names every plugin, also one that cannot be.
  constexpr const char* kNoPlugin = "a plugin that there is not";
  if (check_and_remove_inventory_plugin(kNoPlugin, std::strlen(kNoPlugin)))
    return Inventory::kUnknown;
  return check_and_remove_inventory_plugin(kName, std::strlen(kName)) ? Inventory::kNamed
                                                                      : Inventory::kNotNamed;
}

std::optional<bool> ends_tasks() {
  if (&opts == nullptr) return std::nullopt;
  switch (opts.final_state) {
    case kAlive:
    case kStopped:
      return false;
    case kDead:
      return true;
    default:
      return std::nullopt;
  }
}

void avoid_freezer() {
  if (set_compel_interrupt_only_mode != nullptr) {
    set_compel_interrupt_only_mode();
  } else if (dont_use_freeze_cgroup != nullptr) {
    dont_use_freeze_cgroup();
  }
}

}  // namespace stasis::plugin
