// An operation on a job that lives in namespaces of its own, for a program that cannot go there
// itself, because it has threads: a process of ours that is born in them does it, tells how far it
// is, and gives the report.
//
// Blocking; one thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>

#include "base/helper_process.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"
#include "driver/bounded_driver.h"
#include "job/target.h"
#include "operations/operations.h"

namespace stasis::job {

enum class InsideVerb { kSuspend, kResume, kDump, kRecover };

struct InsideOrder {
  InsideVerb verb = InsideVerb::kSuspend;
  SuspendOptions suspend = {};
  ResumeOptions resume = {};
  std::chrono::milliseconds time_limit{0};  // of a resume; zero: none
  // But for on_complete and job, which the job says.
  DumpOptions dump = {};
};

// What it needs from its caller. All referred to must outlive the call; none may be empty.
struct InsideCaller {
  const Interrupt& interrupt;
  Progress& progress;
  std::uint64_t ring_bytes = 0;  // of each mover, for each GPU
  std::optional<DriverTimeouts> timeouts;
  // Starts a process that calls serve_inside().
  std::function<Result<HelperProcess>()> start_helper;
  std::function<void(const std::string&)> note;
};

// Of a suspend or resume, of a dump, or of a recover.
using InsideReport = std::variant<Report, DumpReport, RecoverReport>;

// For a target that is_elsewhere(). The report's process numbers are those in the job's namespaces.
// On an error everything is as the operation says. Relative paths are those of this process.
// kNotRolledBack if the process was lost.
Result<InsideReport> operate_inside(const InsideCaller& caller, const Target& target,
                                    const InsideOrder& order);

// What `ps` shows of such a process.
inline constexpr const char* kInsideName = "stasis-inside";

// In the process: does what it is told, and ends. While the process has one thread; its SIGTERM is
// what stops it.
void serve_inside(const Channel& channel);

}  // namespace stasis::job
