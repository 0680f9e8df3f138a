// SPDX-License-Identifier: GPL-2.0-or-later
// CRIU as the plugin sees it: its log, its inventory, its options. Everything here copes with a
// CRIU that lacks it; nothing of it is promised by CRIU but criu_get_image_dir() and the
// descriptor. On criu's main thread only, but for the log.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace stasis::plugin {

inline constexpr const char* kName = "cuda_plugin";

// One line each in CRIU's log. Thread-safe as far as CRIU's log is: only criu's main thread writes.
void log_info(const std::string& text);
void log_warning(const std::string& text);
// Logs what happened, and what to do about it.
void log_error(const std::string& doing, const Error& error);

// The directory of the image, a descriptor of CRIU's; nothing if there is none.
std::optional<int> image_directory();

// The value of `--plugin-option cuda_plugin.NAME=VALUE`, the last one if there are several; nothing
// if it was not given, or by a CRIU without such options (4.2 has none yet). kUsage if it has no
// value.
Result<std::optional<std::string>> plugin_option(std::string_view name);

// Has the image say that it cannot be restored without this plugin. False if CRIU could not.
bool enter_inventory();

// What the image says: whether a restore needs the plugin. kUnknown: CRIU 4.0, which keeps no
// inventory, or an image made by it.
enum class Inventory { kNamed, kNotNamed, kUnknown };
Inventory probe_inventory();

// Whether CRIU will end the tasks after a dump that succeeds. Nothing if that is unknown.
std::optional<bool> ends_tasks();

// Has CRIU stop threads one by one by ptrace, where it would freeze a whole cgroup: then the
// thread by which the driver acts could not run.
void avoid_freezer();

}  // namespace stasis::plugin
