// Whom a verb is about, on the command line.
//
// One thread at a time, and while the process has one.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "cli/verbs.h"
#include "job/target.h"

namespace stasis::cli {

using job::Target;

// A number or a name.
CLI::Option* add_target(CLI::App& command, Target& target, const std::string& word = "PID");

// Finds the target and goes to where it is. Comes back there in a child of the process that was
// called, which waits, passes signals on and ends with the same status.
Result<void> reach(Context& context, Target& target);

}  // namespace stasis::cli
