// Suspends one job and resumes another on the same GPUs, at once where both fit: each direction of
// the bus has its own speed. Each in a process of its own, in the job's namespaces, as operations
// are about one tree.
//
// Blocking; one thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "base/units.h"
#include "driver/bounded_driver.h"
#include "job/swap_side.h"
#include "job/target.h"
#include "operations/operations.h"

namespace stasis::job {

struct SwapOptions {
  std::chrono::milliseconds timeout = SuspendOptions().timeout;  // for the lock of the first
  MemoryPath path = MemoryPath::kAutomatic;                      // of its GPU memory
  bool ignore_obstacles = false;                                 // as with suspend
  std::optional<AttachWay> attach = {};                          // of the first
  // Of the second, as parse_gpu_map() takes it; empty: where it was.
  std::string gpu_map;
};

// What a swap needs from its caller. All referred to must outlive the call; none may be empty.
struct SwapCaller {
  const Interrupt& interrupt;
  Progress& progress;
  std::uint64_t ring_bytes = 0;  // of each mover, for each GPU
  std::optional<DriverTimeouts> timeouts;
  SwapSide::StartHelper start_helper;
  std::function<void(const std::string&)> note;
  // The sides work with the simulated driver of that library.
  std::function<void(const std::string& library)> simulated;
  std::function<void(nlohmann::json events)> take_trace;
};

struct SwapReport {
  struct Side {
    std::string name;  // as it was given
    Report report;
  };
  Side suspended;
  Side resumed;
  bool at_once = false;
  // Why it was not done at once after that had been tried; empty if it was not tried.
  std::string no_room_at_once;
  Seconds total{0};
};

// As `stasis swap --json` prints it.
nlohmann::json to_json(const SwapReport& report);

// Suspends the tree of `out` and resumes that of `in`. On an error both are as they were, or the
// error says what is not and how to mend it. kWrongState unless the first runs and the second is
// suspended.
Result<SwapReport> swap(const SwapCaller& caller, Target out, Target in,
                        const SwapOptions& options);

// Brings the two programs of each swap that was killed to what was asked for, where the first is
// suspended by now, or else to what they were before: one report for each.
std::vector<RecoverReport> recover_swaps(const SwapCaller& caller);

}  // namespace stasis::job
