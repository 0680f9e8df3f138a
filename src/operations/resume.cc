#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/group_part.h"
#include "checkpoint/suspend_record.h"
#include "driver/gpu_plan.h"
#include "operations/leftovers.h"
#include "operations/neighbours.h"
#include "operations/open.h"
#include "operations/quiesce.h"
#include "operations/rollback.h"

namespace stasis {

namespace {

// The complete GPU map, once it is sure that the memory fits.
Result<std::vector<GpuPair>> check_and_plan(const Environment& env, const Group& group,
                                            const ResumeOptions& options) {
  std::vector<GpuUse> needed;
  std::vector<Gpu> from;
  for (const GroupMember& member : group.members()) {
    if (!member.initial) continue;
    auto state = member.process.cuda_state();
    if (!state || *state != CudaState::kCheckpointed) continue;
    auto memory = recall_suspended(member.process);
    if (!memory) continue;
    needed.insert(needed.end(), memory->uses.begin(), memory->uses.end());
    if (from.empty()) from = std::move(memory->gpus);
  }
  if (needed.empty() && from.empty() && options.gpu_map.empty()) return std::vector<GpuPair>();
  STASIS_TRY_ASSIGN(auto gpus, env.driver.gpus());
  if (from.empty()) from = gpus;
  STASIS_TRY_ASSIGN(auto pairs, plan_gpu_map(env.driver, options.gpu_map, from, gpus));
  STASIS_TRY(check_gpu_memory(needed, pairs, gpus));
  const auto targets = targets_of(needed, pairs);
  STASIS_TRY(refuse_beside_ranks(env, group.infos(), targets));
  tell_of_neighbours_to_come(env, group.infos(), targets);
  return pairs;
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

std::vector<const Process*> cuda_processes(const Group& group) {
  std::vector<const Process*> processes;
  for (const GroupMember& member : group.members())
    if (member.initial) processes.push_back(&member.process);
  return processes;
}

// With room for two movers on each GPU.
std::optional<bool> fits(const Environment& env, const Group& group) {
  std::vector<GpuUse> needed;
  for (const GroupMember& member : group.members()) {
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
  STASIS_TRY_ASSIGN(auto group, Group::open(env.driver, root));
  group.dismiss();
  if (group.cuda_count() == 0) {
    return fail(ErrorCode::kNotCuda,
                fmt::format("neither process {} nor any below it uses CUDA", root.value),
                "`stasis ps` lists the processes that use CUDA");
  }
  TreeStatus out;
  for (const GroupMember& member : group.members()) {
    if (member.initial == CudaState::kRunning) ++out.running;
    if (member.initial == CudaState::kCheckpointed) ++out.suspended;
    if (member.initial == CudaState::kLocked) ++out.locked;
    if (member.initial != CudaState::kRunning) continue;
    const auto agent = direct::AgentClient::probe(member.process.pid());
    if (!agent || !*agent || (*agent)->held_before) out.held_before = true;
  }
  if (out.suspended > 0) out.fits = fits(env, group);
  return out;
}

namespace {

Result<Report> resume_alone(const Environment& env, Pid root, const ResumeOptions& options) {
  Phases phases;
  std::shared_ptr<ImageContent> named;
  Result<void> known;
  if (!options.images_dir.empty()) {
    auto content = open_named(options.images_dir);
    if (content)
      named = std::move(*content);
    else
      known = fail(std::move(content.error()));
  }
  // For `recover`, which may run in another directory.
  std::error_code ignored;
  const std::string where = options.images_dir.empty()
                                ? std::string()
                                : std::filesystem::absolute(options.images_dir, ignored).string();
  STASIS_TRY_ASSIGN(auto opened,
                    open_group(env, "resume", root, where, false, named.get(), options.gpu_map));
  Group& group = opened.group;
  const auto& members = group.members();
  const bool ran = std::none_of(members.begin(), members.end(), [](const GroupMember& member) {
    return member.initial && *member.initial != CudaState::kRunning;
  });
  auto alone = opened.direct.come_back(env);
  if (!alone) return fail(roll_back(env, opened, std::move(alone.error())));
  auto pairs = check_and_plan(env, group, options);
  if (!pairs) return fail(roll_back(env, opened, std::move(pairs.error())));
  if (!known) return fail(roll_back(env, opened, std::move(known.error())));
  // Before what was written down, which may be damaged.
  if (named) opened.direct.add_image(std::move(named));
  for (const Process* process : cuda_processes(group)) {
    const auto memory = recall_suspended(*process);
    if (!memory || memory->image.empty()) continue;
    const auto agent = direct::AgentClient::probe(process->pid());
    if (!agent || !*agent || !(*agent)->of_our_version) {
      return fail(roll_back(
          env, opened,
          refusal(
              {"agent-version", Severity::kRed, process->pid(),
               fmt::format("process {} has no agent that this stasis knows, and its GPU memory's "
                           "content is in {}",
                           process->pid().value, memory->image),
               "resume it with the stasis that has made the image"})));
    }
    for (auto& content : find_content(memory->image))
      opened.direct.add_image(std::move(content));
  }
  auto done = opened.direct.check_found(env, cuda_processes(group));
  if (!done) return fail(roll_back(env, opened, std::move(done.error())));
  opened.direct.prefetch(env, cuda_processes(group), *pairs);
  done = fault(FaultPoint::kResumePlanned);
  if (done) done = env.interrupt.check();
  if (done) {
    phases.begin("restore");
    done = group.restore(*pairs, env.progress);
  }
  if (!done) return fail(roll_back(env, opened, std::move(done.error())));
  // Past this point going on is the way out, also for who finds our record: every process is whole
  // on the GPU, and an unlock is quicker than a checkpoint.
  for (GroupMember& member : group.members()) {
    if (member.initial) member.initial = CudaState::kRunning;
  }
  opened.direct.settle();
  phases.begin("unlock");
  done = opened.journal->update(journal_targets(group.members()));
  if (done) done = group.unlock();
  if (done) done = verify_states(group, CudaState::kRunning);
  phases.end();
  if (!done) {
    // What rolling back comes to, now.
    auto on = group.roll_back();
    if (!on) return fail(rolled_back(env, opened, std::move(done.error()), std::move(on)));
    env.tell("it runs, at the second attempt; the first failed: " + done.error().to_string());
  }
  group.dismiss();
  auto moved = opened.direct.move_in(env, cuda_processes(group), phases);
  if (!moved) {
    Error why =
        stands_still(std::move(moved.error()), root, try_by_themselves(cuda_processes(group)));
    if (why.code != ErrorCode::kNotRolledBack)
      opened.journal->finish();
    else if (!where.empty())
      (void)opened.journal->forget_image();
    return fail(std::move(why));
  }
  phases.end();
  fault_only(FaultPoint::kResumeVerified);
  for (const GroupMember& member : group.members())
    forget_suspended(member.process);
  opened.journal->finish();
  decide_swaps(group);
  Report report;
  report.root = root;
  report.processes = report_processes(group);
  report.total = phases.total();
  report.direct_bytes = *moved;
  report.was_so = ran && *moved == 0;
  report.phases = phases.take();
  return report;
}

}  // namespace

Result<Report> resume(const Environment& env, Pid root, const ResumeOptions& options) {
  auto report = resume_alone(env, root, options);
  if (options.part == nullptr) return report;
  if (!report) return fail(options.part->give_up(std::move(report.error())));
  auto others = options.part->finish();
  if (others) return report;
  return fail(std::move(others.error()).within(fmt::format("process {} runs", root.value)));
}

}  // namespace stasis
