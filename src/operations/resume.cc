#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/gpu_room.h"
#include "checkpoint/suspend_record.h"
#include "direct/neighbours.h"
#include "driver/gpu_plan.h"
#include "group/group_part.h"
#include "operations/leftovers.h"
#include "operations/open.h"
#include "operations/quiesce.h"
#include "operations/rollback.h"

namespace stasis {

namespace {

struct ResumePlan {
  std::vector<GpuPair> pairs;  // the complete GPU map
  std::vector<GpuUse> needed;
};

// Once it is sure that the memory fits.
Result<ResumePlan> check_and_plan(const Environment& env, const ProcessTree& tree,
                                  const ResumeOptions& options) {
  std::vector<GpuUse> needed;
  std::vector<Gpu> from;
  for (const TreeMember& member : tree.members()) {
    if (!member.initial) continue;
    auto state = member.process.cuda_state();
    if (!state || *state != CudaState::kCheckpointed) continue;
    auto memory = recall_suspended(member.process);
    if (!memory) continue;
    needed.insert(needed.end(), memory->uses.begin(), memory->uses.end());
    if (from.empty()) from = std::move(memory->gpus);
  }
  if (needed.empty() && from.empty() && options.gpu_map.empty()) return ResumePlan();
  STASIS_TRY_ASSIGN(auto gpus, env.driver.gpus());
  if (from.empty()) from = gpus;
  STASIS_TRY_ASSIGN(auto pairs, plan_gpu_map(env.driver, options.gpu_map, from, gpus));
  STASIS_TRY(check_gpu_memory(needed, pairs, gpus));
  const auto targets = targets_of(needed, pairs);
  STASIS_TRY(refuse_beside_ranks(env, tree.infos(), targets));
  tell_of_neighbours_to_come(env, tree.infos(), targets);
  return ResumePlan{std::move(pairs), std::move(needed)};
}

// Before the driver is asked: what a process shares comes back with those that it shares it with,
// and a process that misses some of it can neither go on nor be suspended again.
Result<void> refuse_some_of_sharers(const ProcessTree& tree) {
  const auto has = [&](Pid pid) {
    return std::any_of(tree.members().begin(), tree.members().end(),
                       [&](const TreeMember& one) { return one.process.pid() == pid; });
  };
  for (const TreeMember& member : tree.members()) {
    if (member.initial != CudaState::kCheckpointed) continue;
    const auto memory = recall_suspended(member.process);
    if (!memory || memory->with.pid.value == 0 || has(memory->with.pid)) continue;
    const auto with = proc::ProcFs().process(memory->with.pid);
    if (!with || with->id() != memory->with || with->has_ended()) continue;
    const auto agent = direct::probe_agent(member.process.pid());
    if (!agent || !*agent || !((*agent)->shares || (*agent)->detached)) continue;
    return fail(refusal(
        {"shared-gpu-memory", Severity::kRed, member.process.pid(),
         fmt::format("process {} shares GPU memory with others that were suspended with it, which "
                     "come back together",
                     member.process.pid().value),
         fmt::format("bring all of them back: `stasis resume {}`", with->pid.value)}));
  }
  return {};
}

// The content that the user says is there.
Result<std::shared_ptr<ImageContent>> open_named(const std::string& images_dir) {
  auto content = ImageContent::open(images_dir);
  std::error_code ignored;
  const bool damaged = std::filesystem::exists(
      std::filesystem::path(images_dir) / content_index_path(ContentKind::kGpu), ignored);
  if (content || (damaged && content.error().code != ErrorCode::kIo)) return content;
  return fail(
      ErrorCode::kImageIncomplete,
      fmt::format("{} holds no content of GPU memory: {}", images_dir, content.error().message),
      "name the image that the job was restored from, or a copy of it");
}

std::vector<const Process*> cuda_processes(const ProcessTree& tree) {
  std::vector<const Process*> processes;
  for (const TreeMember& member : tree.members())
    if (member.initial) processes.push_back(&member.process);
  return processes;
}

// With room for two movers on each GPU.
std::optional<bool> fits(const Environment& env, const ProcessTree& tree) {
  std::vector<GpuUse> needed;
  for (const TreeMember& member : tree.members()) {
    if (member.initial != CudaState::kCheckpointed) continue;
    auto memory = recall_suspended(member.process);
    if (!memory || memory->uses.empty()) return std::nullopt;
    needed.insert(needed.end(), memory->uses.begin(), memory->uses.end());
  }
  auto gpus = env.driver.gpus();
  if (!gpus || needed.empty()) return std::nullopt;
  for (const Gpu& gpu : *gpus)
    needed.push_back({gpu.uuid, 2 * kContextBytes});
  return check_gpu_memory(needed, {}, *gpus).has_value();
}

}  // namespace

Result<TreeStatus> probe(const Environment& env, Pid root) {
  STASIS_TRY_ASSIGN(auto tree, ProcessTree::open(env.driver, root));
  tree.dismiss();
  if (tree.cuda_count() == 0) {
    return fail(ErrorCode::kNotCuda,
                fmt::format("neither process {} nor any below it uses CUDA", root.value),
                "`stasis ps` lists the processes that use CUDA");
  }
  TreeStatus out;
  for (const TreeMember& member : tree.members()) {
    if (member.initial == CudaState::kRunning) ++out.running;
    if (member.initial == CudaState::kCheckpointed) ++out.suspended;
    if (member.initial == CudaState::kLocked) ++out.locked;
    if (member.initial != CudaState::kRunning) continue;
    const auto agent = direct::probe_agent(member.process.pid());
    if (!agent || !*agent || (*agent)->held_before) out.held_before = true;
  }
  if (out.suspended > 0) out.fits = fits(env, tree);
  return out;
}

namespace {

// One resume, by the steps of docs/how-it-works.md.
class ResumeRun {
 public:
  // The references outlive it.
  ResumeRun(const Environment& env, Pid root, const ResumeOptions& options)
      : env_(env), root_(root), options_(options) {}

  Result<Report> run() {
    const auto named = open_images();
    STASIS_TRY(open());
    if (auto ready = get_ready(named); !ready) return fail(undone(std::move(ready.error())));
    if (auto restored = restore(); !restored) return fail(undone(std::move(restored.error())));
    STASIS_TRY(unlock());
    STASIS_TRY_ASSIGN(const std::uint64_t moved, move_in());
    opened_->journal->finish();
    decide_swaps(opened_->tree);
    return report(moved);
  }

 private:
  ProcessTree& tree() { return opened_->tree; }
  Error undone(Error why) {
    room_.leave();  // a roll-back looks for its own
    return roll_back(env_, *opened_, std::move(why));
  }

  // The images that the user has named. What is wrong with them is said when the tree is open.
  Result<void> open_images() {
    if (options_.images_dir.empty()) return {};
    // For `recover`, which may run in another directory.
    std::error_code ignored;
    where_ = std::filesystem::absolute(options_.images_dir, ignored).string();
    STASIS_TRY_ASSIGN(named_, open_named(options_.images_dir));
    return {};
  }

  Result<void> open() {
    STASIS_TRY_ASSIGN(auto opened, open_tree(env_, Operation::kResume, root_, where_, false,
                                             named_.get(), options_.gpu_map));
    opened_.emplace(std::move(opened));
    const auto& members = tree().members();
    ran_ = std::none_of(members.begin(), members.end(), [](const TreeMember& member) {
      return member.initial && *member.initial != CudaState::kRunning;
    });
    return {};
  }

  // Where the GPU memory's content is, and on which GPUs it is to be.
  Result<void> get_ready(const Result<void>& named) {
    STASIS_TRY(refuse_some_of_sharers(tree()));
    STASIS_TRY(opened_->direct.come_back(env_));
    STASIS_TRY_ASSIGN(plan_, check_and_plan(env_, tree(), options_));
    STASIS_TRY(named);
    // Before what was written down, which may be damaged.
    if (named_) opened_->direct.add_image(std::move(named_));
    for (const Process* process : cuda_processes(tree()))
      STASIS_TRY(add_images_of(*process));
    STASIS_TRY(opened_->direct.check_found(env_, cuda_processes(tree())));
    // What an image lies on may take its time.
    STASIS_TRY_ASSIGN(room_, GpuRoom::find(env_.driver, plan_.needed, plan_.pairs,
                                           {env_.interrupt, [&](auto text) { env_.tell(text); }}));
    STASIS_TRY(opened_->direct.hold_neighbours(env_, tree().infos(),
                                               targets_of(plan_.needed, plan_.pairs), {}));
    opened_->direct.prefetch(env_, cuda_processes(tree()), plan_.pairs);
    STASIS_TRY(fault(FaultPoint::kResumePlanned));
    return env_.interrupt.check();
  }

  Result<void> add_images_of(const Process& process) {
    const auto memory = recall_suspended(process);
    if (!memory || memory->image.empty()) return {};
    const auto agent = direct::probe_agent(process.pid());
    if (!agent || !*agent || !(*agent)->of_our_version) {
      return fail(refusal(
          {"agent-version", Severity::kRed, process.pid(),
           fmt::format("process {} has no agent that this stasis knows, and its GPU memory's "
                       "content is in {}",
                       process.pid().value, memory->image),
           "resume it with the stasis that has made the image"}));
    }
    for (auto& content : find_content(memory->image))
      opened_->direct.add_image(std::move(content));
    return {};
  }

  Result<void> restore() {
    phases_.begin("restore");
    STASIS_TRY(tree().restore(plan_.pairs, env_.progress));
    // Past this point going on is the way out, also for who finds our record: every process is
    // whole on the GPU, and an unlock is quicker than a checkpoint.
    for (TreeMember& member : tree().members()) {
      if (member.initial) member.initial = CudaState::kRunning;
    }
    opened_->direct.settle();
    return {};
  }

  Result<void> unlock() {
    phases_.begin("unlock");
    auto done = opened_->journal->update(journal_targets(tree().members()));
    if (done) done = tree().unlock();
    if (done) done = verify_states(tree(), CudaState::kRunning);
    phases_.end();
    if (!done) {
      room_.leave();
      // What rolling back comes to, now.
      auto on = tree().roll_back();
      if (!on) return fail(rolled_back(env_, *opened_, std::move(done.error()), std::move(on)));
      env_.tell("it runs, at the second attempt; the first failed: " + done.error().to_string());
    }
    tree().dismiss();
    return {};
  }

  // The bytes that did not go by the driver.
  Result<std::uint64_t> move_in() {
    auto moved = opened_->direct.move_in(env_, cuda_processes(tree()), phases_,
                                         IfItFails::kTheyStandStill, std::move(room_));
    phases_.end();
    if (!moved) {
      Error why =
          stands_still(std::move(moved.error()), root_, try_by_themselves(cuda_processes(tree())));
      if (why.code != ErrorCode::kNotRolledBack)
        opened_->journal->finish();
      else if (!where_.empty())
        (void)opened_->journal->forget_image();
      return fail(std::move(why));
    }
    fault_only(FaultPoint::kResumeVerified);
    for (const TreeMember& member : tree().members())
      forget_suspended(member.process);
    return moved;
  }

  Report report(std::uint64_t moved) {
    Report out;
    out.root = root_;
    out.processes = report_processes(tree());
    out.total = phases_.total();
    out.direct_bytes = moved;
    out.was_so = ran_ && moved == 0;
    out.phases = phases_.take();
    return out;
  }

  const Environment& env_;
  const Pid root_;
  const ResumeOptions& options_;
  Phases phases_;
  std::string where_;  // of the images that the user has named, absolute; empty: none
  std::shared_ptr<ImageContent> named_;
  std::optional<OpenedTree> opened_;
  bool ran_ = false;  // before
  ResumePlan plan_;
  GpuRoom room_;  // until the driver and the agents have taken it
};

}  // namespace

Result<Report> resume(const Environment& env, Pid root, const ResumeOptions& options) {
  auto report = ResumeRun(env, root, options).run();
  if (!report) return fail(told(options.part, std::move(report.error())));
  if (options.part == nullptr) return report;
  auto others = options.part->finish();
  if (others) return report;
  return fail(std::move(others.error()).within(fmt::format("process {} runs", root.value)));
}

}  // namespace stasis
