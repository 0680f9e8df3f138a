// How --help looks: 80 columns, also for long texts.
#pragma once

#include <CLI/CLI.hpp>

namespace stasis::cli {

// For `app` and the verbs that are added to it afterwards.
void set_help_format(CLI::App& app);

}  // namespace stasis::cli
