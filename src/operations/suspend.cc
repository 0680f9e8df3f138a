#include "base/fault_point.h"
#include "checkpoint/inherited_files.h"
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
  // A dump that comes later could not tell them from others: their parent will have new ones then.
  const auto inherited =
      find_inherited_files(proc::ProcFs(), group.members(), env.driver.info().simulated, true);
  auto done = quiesce(env, group, options.timeout, options.ignore_obstacles, phases);
  if (done && inherited) {
    for (const InheritedFiles& files : *inherited) {
      if (auto replaced = replace_inherited_files(files); !replaced) {
        env.tell("a later dump will be refused: " + replaced.error().to_string());
      }
    }
  }
  phases.end();
  if (done) done = verify_states(group, CudaState::kCheckpointed);
  if (done) done = fault(FaultPoint::kSuspendVerified);
  if (!done) return fail(roll_back(*opened, std::move(done.error())));
  group.dismiss();
  remember_suspended(group);
  opened->journal->finish();
  Report report;
  report.root = root;
  report.processes = report_processes(group);
  report.total = phases.total();
  report.lock_tries = group.lock_tries();
  report.phases = phases.take();
  return report;
}

}  // namespace stasis
