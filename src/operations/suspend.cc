#include <utility>

#include "base/fault_point.h"
#include "checkpoint/suspended.h"
#include "operations/common.h"

namespace stasis {

Result<Report> suspend(const Environment& env, Pid root, const SuspendOptions& options) {
  Phases phases;
  auto opened = open_group(env, "suspend", root, {});
  if (!opened) return fail(std::move(opened.error()));
  if (auto clear = refuse_obstacles(env, *opened, options.ignore_obstacles); !clear) {
    return fail(std::move(clear.error()));
  }
  Group& group = opened->group;
  QuiesceOptions how{options.timeout, options.ignore_obstacles, false, options.path};
  how.at_rest = [told = false, &options]() mutable {
    if (!std::exchange(told, true) && options.at_rest) options.at_rest();
  };
  auto done = quiesce(env, *opened, how, phases);
  phases.end();
  const auto standstill = phases.standstill();
  if (done) done = verify_states(group, CudaState::kCheckpointed);
  if (done) done = fault(FaultPoint::kSuspendVerified);
  if (!done) return fail(roll_back(*opened, std::move(done.error())));
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

}  // namespace stasis
