#include "operations/quiesce.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/inherited_files.h"
#include "checkpoint/ranks.h"
#include "direct/agent_probe.h"
#include "direct/hold_back.h"
#include "operations/refusals.h"

namespace stasis {

namespace {

// As part of a group of several nodes: where no gates were closed, the locks quiesce all.
Result<void> lock_together(const Environment& env, ProcessTree& tree, GroupPart& part,
                           Phases& phases) {
  for (;;) {
    STASIS_TRY(tree.lock(part.left(), env.interrupt));
    STASIS_TRY_ASSIGN(const auto moment, part.wait_until_quiesced());
    if (!moment) return fault(FaultPoint::kPartQuiesced);
    phases.runs();
    STASIS_TRY(let_locked_go_on(tree));
    std::this_thread::sleep_for(*moment);
    phases.stands_still();
  }
}

Result<void> quiesce_tree(const Environment& env, OpenedTree& opened, const QuiesceOptions& options,
                          Phases& phases) {
  ProcessTree& tree = opened.tree;
  if (options.for_dump()) tree.drop_zeros();
  const MoveOutPlan plan = MoveOutPlan::make(env, tree, options);
  STASIS_TRY(opened.direct.move_out(env, tree, plan, options, phases));
  GroupPart* const part = options.part;
  if (part != nullptr && !part->is_quiesced()) {
    phases.begin("meet");
    STASIS_TRY(part->wait_for_all());
  }
  for (;;) {
    phases.begin("lock");
    const bool runs =
        std::any_of(tree.members().begin(), tree.members().end(),
                    [](const TreeMember& member) { return member.initial == CudaState::kRunning; });
    if (runs && !phases.standing()) phases.stands_still();
    const bool others = part != nullptr && !part->is_quiesced();
    STASIS_TRY(others ? lock_together(env, tree, *part, phases)
                      : tree.lock(options.timeout, env.interrupt));
    if (!plan.by_driver()) opened.direct.tell_of_new(env, tree);
    if (options.on_quiesced) options.on_quiesced();
    // Once more: the lock may have taken seconds, in which the ranks of a job have met.
    std::set<Pid> none;
    if (!options.ignore_obstacles) {
      STASIS_TRY(refuse_driver_obstacles(env, tree.members(), false, none, true));
      STASIS_TRY(opened.direct.refuse_late_sharing(env, tree, plan.path));
    }
    phases.begin("checkpoint");
    STASIS_TRY(tree.park_threads());
    // What they have forked until then; from now on they fork no process.
    STASIS_TRY_ASSIGN(auto more, tree.probe_again());
    if (more) continue;
    STASIS_TRY(tree.note_programs());
    STASIS_TRY(opened.direct.expect_agents());
    STASIS_TRY_ASSIGN(
        auto inherited,
        find_inherited_files(proc::ProcFs(), tree.members(), env.driver.info().simulated,
                             !options.for_dump() || options.ignore_obstacles));
    const auto replaced = replace_inherited_files(inherited, opened.journal.get());
    if (!replaced && options.for_dump()) return replaced;
    if (!replaced) env.tell("a later dump may be refused: " + replaced.error().to_string());
    for (const TreeMember& member : tree.members())
      if (member.initial) direct::note_hold(member.process.pid(), member.process.pidfd());
    // The driver has the GPU switched for it.
    if (plan.beside_restored())
      STASIS_TRY(opened.direct.hold_neighbours(env, tree.infos(), {}, options.timeout));
    STASIS_TRY(tree.checkpoint(env.progress, env.interrupt));
    // A checkpoint takes seconds, in which a process without CUDA can start one that has.
    STASIS_TRY_ASSIGN(more, tree.probe_again());
    if (!more) return opened.direct.finish_out(phases);
  }
}

}  // namespace

Result<void> quiesce(const Environment& env, OpenedTree& opened, const QuiesceOptions& options,
                     Phases& phases) {
  auto done = quiesce_tree(env, opened, options, phases);
  if (done || done.error().code != ErrorCode::kTimeout) return done;
  const auto others = find_other_ranks(proc::ProcFs(), opened.tree.root());
  if (!others) return done;
  Error error = std::move(done.error());
  error.remedy = fmt::format("{}; {}", describe_other_ranks(*others), error.remedy);
  return fail(std::move(error));
}

Result<void> verify_states(const ProcessTree& tree, CudaState wanted) {
  for (const TreeMember& member : tree.members()) {
    if (!member.initial || !member.process.alive()) continue;
    auto state = member.process.cuda_state();
    if (!state) {
      if (state.error().code == ErrorCode::kProcessGone) continue;
      return fail(std::move(state.error()));
    }
    if (*state == wanted) continue;
    if (!*state) {
      // One that runs may become what it likes, and one that is about to end has no state either.
      if (wanted == CudaState::kRunning || proc::ProcFs().is_ending(member.process.pid())) continue;
      return fail(
          ErrorCode::kProcessGone,
          fmt::format("process {} has become another program (exec)", member.process.pid().value),
          "start the program again");
    }
    return fail(ErrorCode::kWrongState,
                fmt::format("process {} is {} and should be {}", member.process.pid().value,
                            cuda_state_name(**state), cuda_state_name(wanted)),
                "another tool acts on it; wait for it to end");
  }
  return {};
}

}  // namespace stasis
