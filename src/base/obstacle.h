// What stands in the way of an operation, found before anything is touched: what the driver, an
// agent or CRIU would refuse or lose of a process, and what this machine lacks. The doctor's lists
// have what is fine too, in green.
//
// Plain values; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/ids.h"

namespace stasis {

enum class Severity {
  kGreen,   // fine
  kYellow,  // works, with a limit that is worth knowing
  kRed,     // the operation will fail
};
std::string_view severity_name(Severity severity);  // "green", "yellow", "red"

// The option by which a user who knows better goes on in spite of it.
enum class Override { kNone, kIgnoreObstacles, kIgnoreUndumpable };

// "--ignore-obstacles"; empty if there is none.
std::string_view option_of(Override by);

struct Obstacle {
  std::string id;  // what it is, for programs: "managed-memory", "tcp-connection", "criu-check"
  Severity severity = Severity::kRed;
  Pid pid = {};             // of what one process has; 0: of the machine, or of the whole tree
  std::string what;         // with the value seen: "driver 580.159.04", "4 GiB free in /images"
  std::string remedy = {};  // what to do; empty if green
  Override by = Override::kNone;
};

// The severity of the worst of them; green if there are none.
Severity worst(std::span<const Obstacle> obstacles);

}  // namespace stasis
