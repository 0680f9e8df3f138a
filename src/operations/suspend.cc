#include "checkpoint/suspended.h"
#include "operations/common.h"

namespace stasis {

using namespace operations;

Result<Report> suspend(const Environment& env, Pid root, const SuspendOptions& options) {
  Phases phases;
  auto opened = open_group(env, "suspend", root, {});
  if (!opened) return fail(std::move(opened.error()));
  Group& group = opened->group;
  phases.begin("lock");
  auto done = group.lock(options.timeout, env.interrupt);
  if (done) {
    phases.begin("checkpoint");
    done = group.checkpoint(env.progress, env.interrupt);
  }
  phases.end();
  if (done) done = verify_states(group, CudaState::kCheckpointed);
  if (!done) return fail(operations::roll_back(*opened, std::move(done.error())));
  group.dismiss();
  remember_suspended(group);
  opened->journal->finish();
  Report report;
  report.root = root;
  report.processes = report_processes(group);
  report.total = phases.total();
  report.phases = phases.take();
  return report;
}

}  // namespace stasis
