#include <utility>

#include "base/fault_point.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_probe.h"
#include "group/group_part.h"
#include "operations/leftovers.h"
#include "operations/open.h"
#include "operations/quiesce.h"
#include "operations/refusals.h"
#include "operations/rollback.h"

namespace stasis {

namespace {

// By what the GPU memory of processes that are suspended went. Nothing if an agent cannot be seen.
std::optional<MemoryPath> moved_before(const ProcessTree& tree) {
  MemoryPath path = MemoryPath::kDriver;
  for (const TreeMember& member : tree.members()) {
    if (!member.initial) continue;
    const auto agent = direct::probe_agent(member.process.pid());
    if (!agent) return std::nullopt;
    if (*agent && direct::is_away((*agent)->state)) path = MemoryPath::kDirect;
  }
  return path;
}

// `again`: what the error of the try before says to try.
Result<Report> suspend_once(const Environment& env, Pid root, const SuspendOptions& options,
                            Retry again, Phases& phases) {
  auto opened = open_tree(env, Operation::kSuspend, root, {});
  if (!opened) return fail(told(options.part, std::move(opened.error())));
  if (auto clear = refuse_obstacles(env, *opened, options.ignore_obstacles); !clear)
    return fail(told(options.part, std::move(clear.error())));
  ProcessTree& tree = opened->tree;
  if (options.part != nullptr) {
    if (auto clear = refuse_rdma(env, tree, options.ignore_obstacles); !clear)
      return fail(told(options.part, std::move(clear.error())));
  }
  if (auto clear = refuse_unstoppable(tree); !clear)
    return fail(told(options.part, std::move(clear.error())));
  QuiesceOptions how{.timeout = options.timeout,
                     .ignore_obstacles = options.ignore_obstacles,
                     .path = options.path,
                     .again = again,
                     .part = options.part};
  if (options.on_quiesced) {
    how.on_quiesced = [told = false, &options]() mutable {
      if (!std::exchange(told, true)) options.on_quiesced();
    };
  }
  auto done = quiesce(env, *opened, how, phases);
  phases.end();
  const auto downtime = phases.downtime();
  if (done) done = verify_states(tree, CudaState::kCheckpointed);
  if (done) done = fault(FaultPoint::kSuspendVerified);
  if (done && options.part != nullptr) done = options.part->finish();
  if (done && options.part != nullptr) fault_only(FaultPoint::kPartDone);
  if (!done) {
    done = fail(told(options.part, std::move(done.error())));
    const ErrorCode why = done.error().code;
    Error error = roll_back(env, *opened, std::move(done.error()));
    if (error.code != ErrorCode::kNotRolledBack) phases.runs();
    const bool final = error.code != why || why == ErrorCode::kTimeout ||
                       why == ErrorCode::kProcessGone || !env.interrupt.check();
    // With --path direct there is no other way.
    const bool closed = error.retry == Retry::kByDriver && options.path == MemoryPath::kDirect;
    if (final || closed) error.retry = Retry::kNone;
    return fail(std::move(error));
  }
  tree.dismiss();
  const std::uint64_t direct_bytes = opened->direct.bytes();
  opened->direct.dismiss();
  remember_suspended(tree);
  opened->journal->finish();
  // Of what was suspended already nothing is decided.
  if (downtime) decide_swaps(tree);
  Report report;
  report.root = root;
  report.processes = report_processes(tree);
  report.total = phases.total();
  report.downtime = downtime;
  report.was_so = !downtime;
  if (report.was_so) report.moved_before = moved_before(tree);
  report.lock_tries = tree.lock_tries();
  report.direct_bytes = direct_bytes;
  report.phases = phases.take();
  return report;
}

}  // namespace

Result<Report> suspend(const Environment& given, Pid root, const SuspendOptions& options) {
  const Environment env = given.with(interrupt_of(options.part, given.interrupt));
  // Of all tries, if there are several: the programs have stood still in each.
  Phases phases;
  if (options.attach) {
    auto come = attach_first(env, root,
                             {*options.attach, options.timeout, options.ignore_obstacles}, phases);
    if (!come) return fail(told(options.part, std::move(come.error())));
  }
  auto done = suspend_once(env, root, options, Retry::kNone, phases);
  const auto once_more = [&](Retry retry, const char* how) {
    // The other parts of a group know of one try.
    if (done || done.error().retry != retry || options.part != nullptr) return;
    env.tell(how + done.error().to_string());
    done = suspend_once(env, root, options, retry, phases);
  };
  once_more(Retry::kSame, "once more: ");
  once_more(Retry::kCopyFirst, "once more, with GPU memory copied before the driver is asked: ");
  once_more(Retry::kByDriver, "the driver's path is taken: ");
  return done;
}

}  // namespace stasis
