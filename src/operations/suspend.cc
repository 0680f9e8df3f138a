#include <utility>

#include "base/fault_point.h"
#include "checkpoint/suspend_record.h"
#include "operations/common.h"

namespace stasis {

namespace {

enum class Again { kNo, kSame, kCopyFirst, kByDriver };

// `how_again` is why it is tried once more, if it is. An error after which all is as it was sets
// `again` if it is worth while to try once more.
Result<Report> suspend_once(const Environment& env, Pid root, const SuspendOptions& options,
                            Again how_again, Phases& phases, Again& again) {
  again = Again::kNo;
  auto opened = open_group(env, "suspend", root, {});
  if (!opened) return fail(std::move(opened.error()));
  if (auto clear = refuse_obstacles(env, *opened, options.ignore_obstacles); !clear) {
    return fail(std::move(clear.error()));
  }
  Group& group = opened->group;
  QuiesceOptions how{options.timeout, options.ignore_obstacles, false, options.path};
  how.copies_first = how_again == Again::kCopyFirst;
  if (how_again == Again::kByDriver) {
    how.path = MemoryPath::kDriver;
    how.reason_is_told = true;
  }
  if (options.at_rest) {
    how.at_rest = [told = false, &options]() mutable {
      if (!std::exchange(told, true)) options.at_rest();
    };
  }
  auto done = quiesce(env, *opened, how, phases);
  phases.end();
  const auto standstill = phases.standstill();
  if (done) done = verify_states(group, CudaState::kCheckpointed);
  if (done) done = fault(FaultPoint::kSuspendVerified);
  if (!done) {
    const ErrorCode why = done.error().code;
    const bool by_driver = done.error().driver.has_value();
    Error error = roll_back(env, *opened, std::move(done.error()));
    if (error.code != ErrorCode::kNotRolledBack) phases.runs();
    const GpuMemory& direct = opened->direct;
    if (error.code != why || why == ErrorCode::kTimeout || why == ErrorCode::kProcessGone ||
        !env.interrupt.check())
      return fail(std::move(error));
    if (direct.found_half_way() || direct.lost_agent()) again = Again::kSame;
    // With --path direct there is no other way.
    else if (direct.copy_was_silent())
      again = options.path == MemoryPath::kDirect ? Again::kNo : Again::kByDriver;
    // A mover that is lost, or a driver that does not like it.
    else if (direct.copy_failed() || (direct.copied_beside() && by_driver))
      again = Again::kCopyFirst;
    return fail(std::move(error));
  }
  group.dismiss();
  const std::uint64_t direct_bytes = opened->direct.bytes();
  opened->direct.dismiss();
  remember_suspended(group);
  opened->journal->finish();
  // Of what was suspended already nothing is decided.
  if (standstill) decide_swaps(group);
  Report report;
  report.root = root;
  report.processes = report_processes(group);
  report.total = phases.total();
  report.standstill = standstill;
  report.lock_tries = group.lock_tries();
  report.direct_bytes = direct_bytes;
  report.phases = phases.take();
  return report;
}

}  // namespace

Result<Report> suspend(const Environment& env, Pid root, const SuspendOptions& options) {
  // Of all tries, if there are several: the programs have stood still in each.
  Phases phases;
  Again again = Again::kNo;
  auto done = suspend_once(env, root, options, Again::kNo, phases, again);
  if (!done && again == Again::kSame) {
    env.tell("once more: " + done.error().to_string());
    done = suspend_once(env, root, options, Again::kSame, phases, again);
  }
  if (!done && again == Again::kCopyFirst) {
    env.tell("once more, with GPU memory copied before the driver is asked: " +
             done.error().to_string());
    done = suspend_once(env, root, options, Again::kCopyFirst, phases, again);
  }
  if (!done && again == Again::kByDriver) {
    env.tell("the driver's path is taken: " + done.error().to_string());
    done = suspend_once(env, root, options, Again::kByDriver, phases, again);
  }
  return done;
}

}  // namespace stasis
