// Turns what the driver answered about a process into an Error that says what is wrong and what to
// do, by looking at the process: the driver's OPERATING_SYSTEM (304), for one, stands for a missing
// process, a missing permission and a crashed one alike.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "driver/driver.h"
#include "proc/procfs.h"

namespace stasis {

// What an answer of the driver means in a situation. {pid} and {action} stand in the texts.
struct DriverAnswer {
  int number = 0;  // the CUresult; 0 is any, below it ours (driver/driver.h)
  std::optional<Action> action;
  ErrorCode code = ErrorCode::kDriverError;
  std::string_view meaning;
  std::string_view remedy;
};

// In the order in which they are tried, for a process that is alive and may be traced.
std::span<const DriverAnswer> driver_answers();

// Reads /proc; changes nothing. `pid` need not exist. The Error carries `failure` as it came.
Error explain_driver_failure(const DriverFailure& failure, Action action, Pid pid,
                             const proc::ProcFs& procfs);

}  // namespace stasis
