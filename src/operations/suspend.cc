#include <utility>

#include "base/fault_point.h"
#include "checkpoint/suspended.h"
#include "operations/common.h"

namespace stasis {

namespace {

// An error after which all is as it was sets `again` if it is worth while to try once more with
// `copies_first`.
Result<Report> suspend_once(const Environment& env, Pid root, const SuspendOptions& options,
                            bool copies_first, bool& again) {
  Phases phases;
  auto opened = open_group(env, "suspend", root, {});
  if (!opened) return fail(std::move(opened.error()));
  if (auto clear = refuse_obstacles(env, *opened, options.ignore_obstacles); !clear) {
    return fail(std::move(clear.error()));
  }
  Group& group = opened->group;
  QuiesceOptions how{options.timeout, options.ignore_obstacles, false, options.path};
  how.copies_first = copies_first;
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
    Error error = roll_back(*opened, std::move(done.error()));
    // A mover that is lost, or a driver that does not like it.
    const DirectPath& direct = opened->direct;
    again = error.code == why && why != ErrorCode::kTimeout && why != ErrorCode::kProcessGone &&
            (direct.copy_failed() || (direct.copied_beside() && why == ErrorCode::kDriverError)) &&
            env.interrupt.check();
    return fail(std::move(error));
  }
  group.dismiss();
  const std::uint64_t direct_bytes = opened->direct.bytes();
  opened->direct.dismiss();
  remember_suspended(group);
  opened->journal->finish();
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
  bool again = false;
  auto done = suspend_once(env, root, options, false, again);
  if (done || !again) return done;
  env.tell("once more, with GPU memory copied before the driver is asked: " +
           done.error().to_string());
  return suspend_once(env, root, options, true, again);
}

}  // namespace stasis
