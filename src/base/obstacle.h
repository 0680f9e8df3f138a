// What stands against an operation on a process, found before anything was touched: what the
// driver, an agent or CRIU would refuse or lose.
//
// Plain values; any thread.
#pragma once

#include <string>
#include <string_view>

#include "base/ids.h"

namespace stasis {

// The option by which a user who knows better goes on in spite of it.
enum class Override { kNone, kIgnoreObstacles, kIgnoreUndumpable };

// "--ignore-obstacles"; empty if there is none.
std::string_view option_of(Override by);

struct Obstacle {
  std::string id;      // what it is, for programs: "managed-memory", "nccl", "tcp-connection", ...
  Pid pid;             // whom it concerns
  std::string what;    // "managed memory, which the driver refuses to checkpoint"
  std::string remedy;  // what its user can do
  Override by = Override::kIgnoreObstacles;
};

}  // namespace stasis
