#include "operations/open.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "direct/agent_client.h"
#include "direct/stillness.h"
#include "image/image_reader.h"
#include "operations/leftovers.h"
#include "operations/process_lock.h"
#include "operations/refusals.h"
#include "proc/parking.h"

namespace stasis {

namespace {

// What a killed operation left behind is brought back to what it was before that one.
void inherit_states(Group& group, const std::vector<JournalTarget>& inherited) {
  for (GroupMember& member : group.members()) {
    if (!member.initial) continue;
    for (const JournalTarget& left : inherited) {
      if (may_be_same(left, member.process.id())) member.initial = left.initial;
    }
  }
}

// Of those that use CUDA: others may come and go all the time.
std::vector<std::pair<Pid, CudaState>> states_of(const Group& group) {
  std::vector<std::pair<Pid, CudaState>> states;
  for (const GroupMember& member : group.members())
    if (member.initial) states.emplace_back(member.process.pid(), *member.initial);
  return states;
}

Error not_cuda(const Group& group) {
  const int root = group.root().value;
  const std::size_t others = group.members().size() - 1;
  if (const auto owner = group.members().front().process.lives_in_memory_of()) {
    return {ErrorCode::kNotCuda,
            fmt::format("process {} runs in the memory of its parent, process {} (vfork, or clone "
                        "with CLONE_VM), and has no CUDA of its own",
                        root, owner->value),
            fmt::format("give process {}", owner->value)};
  }
  return {ErrorCode::kNotCuda,
          others == 0
              ? fmt::format("process {} does not use CUDA", root)
              : fmt::format("neither process {} nor what is below it ({}) uses CUDA", root, others),
          "`stasis ps` lists the processes that use CUDA"};
}

Error failed_state(const Process& process) {
  return {ErrorCode::kFailedState,
          fmt::format("the driver has given up the CUDA state of process {} ({})",
                      process.pid().value, process.info().comm),
          "end it, and restore it from an image if there is one"};
}

// A roll-back that runs out of descriptors leaves its target suspended. Each process takes a pidfd,
// and some while it is asked; CRIU and its files come on top.
Result<void> check_descriptors(std::size_t processes) {
  constexpr std::uint64_t kSpare = 64;
  constexpr std::uint64_t kEach = 7;
  return allow_descriptors(kSpare + kEach * processes);
}

// The operation that was killed, if one of these is in its record.
std::optional<JournalRecord> left_behind(const std::vector<JournalTarget>& targets) {
  const auto entries = read_journal();
  if (!entries) return std::nullopt;
  for (const JournalEntry& entry : *entries) {
    if (entry.under_way) continue;
    for (const JournalTarget& target : entry.record.targets) {
      const bool in_tree =
          std::any_of(targets.begin(), targets.end(),
                      [&](const JournalTarget& one) { return may_be_same(one, target); });
      if (in_tree) return entry.record;
    }
  }
  return std::nullopt;
}

// The agents come to the end of what a killed tool has asked them for under parked threads.
Result<void> finish_stillness_of(const Environment& env, const Group& group) {
  for (const GroupMember& member : group.members())
    if (member.initial == CudaState::kRunning) STASIS_TRY(finish_stillness(env, member.process));
  return {};
}

// By what the processes themselves say: the record of the dump that was cut short may be another
// user's, or of another namespace.
Result<void> check_host_memory_of(const Group& group, const std::optional<JournalRecord>& left) {
  for (const GroupMember& member : group.members()) {
    if (member.initial != CudaState::kCheckpointed) continue;
    auto there = check_host_memory_is_there(member.process.pid());
    if (there || there.error().code == ErrorCode::kProcessGone) continue;
    if (left) there.error().remedy = fmt::format("`stasis recover {}`", left->root.value);
    return there;
  }
  return {};
}

}  // namespace

Result<OpenedGroup> open_group(const Environment& env, const std::string& operation, Pid root,
                               const std::string& image, bool without_cuda,
                               const ImageContent* content, std::span<const GpuMapEntry> gpu_map) {
  // No record is made for what is not there, or not CUDA.
  std::optional<Group> group;
  const auto probe = [&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto opened, Group::open(env.driver, root));
    opened.dismiss();
    group.emplace(std::move(opened));
    if (group->cuda_count() == 0 && !without_cuda) return fail(not_cuda(*group));
    for (const GroupMember& member : group->members()) {
      if (member.initial == CudaState::kFailed) return fail(failed_state(member.process));
    }
    return {};
  };
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(auto tree, procfs.tree(root));
  std::vector<JournalTarget> targets;
  for (const proc::ProcessInfo& info : tree)
    targets.push_back({info.id(), CudaState::kRunning});
  STASIS_TRY(check_descriptors(targets.size()));
  STASIS_TRY(check_not_busy(targets));
  // Before the driver is asked, which keeps its asker waiting while another tool's call goes on.
  std::vector<Pid> numbers;
  for (const JournalTarget& one : targets)
    numbers.push_back(one.pid);
  STASIS_TRY_ASSIGN(auto locks, lock_processes(numbers));
  STASIS_TRY(probe());
  // Before there is a record of ours, which would replace the one that says where that image is.
  const auto left = left_behind(targets);
  // A resume looks where that one did, and says so in its record.
  const bool goes_on = left && left->operation == "resume" && operation == "resume" &&
                       !image.empty() && left->image == image;
  STASIS_TRY(finish_stillness_of(env, *group));
  STASIS_TRY(check_host_memory_of(*group, left));
  if (left && !goes_on) {
    STASIS_TRY(check_content(*group,
                             fmt::format("`stasis recover {0}`; or, if the image is elsewhere "
                                         "now, `stasis resume {0} --images-dir DIR`",
                                         left->root.value),
                             content));
  }
  set_fault_target(root);
  JournalRecord intended{operation, root, Pid{}, image, {}};
  intended.gpu_map = gpu_map_text(gpu_map);
  STASIS_TRY_ASSIGN(auto begun, Journal::begin(std::move(intended)));
  auto journal = std::make_unique<Journal>(std::move(begun));
  if (journal->unwritten()) {
    env.tell(
        "no record of this can be written to the state directory (full, or read-only): if it is "
        "killed, `stasis recover --all` knows nothing of it");
  }
  if (!journal->inherited().empty()) {
    auto ready = wait_for_criu(env, journal->left());
    if (ready) ready = settle(env, journal->inherited());
    if (ready) ready = probe();
    if (!ready) {
      journal->finish();
      return fail(std::move(ready.error()));
    }
    if (journal->left().operation == "dump") (void)clear_half_image(journal->left().image, false);
  }
  // What we saw before the journal was ours may be what another operation, which has ended since,
  // was just doing. So look until what we have entered is what there is.
  for (bool same = false; !same;) {
    inherit_states(*group, journal->inherited());
    const auto entered = states_of(*group);
    auto done = journal->update(journal_targets(group->members()));
    if (done) done = probe();
    if (!done) {
      // What a killed operation has left is entered as ours by now: then the record stays.
      if (journal->inherited().empty()) journal->finish();
      return fail(std::move(done.error()));
    }
    inherit_states(*group, journal->inherited());
    same = states_of(*group) == entered;
  }
  if (auto allowed = fault(FaultPoint::kGroupOpened); !allowed) {
    if (journal->inherited().empty()) journal->finish();
    return fail(std::move(allowed.error()));
  }
  OpenedGroup opened{std::move(locks), std::move(journal), {}, std::move(*group)};
  opened.group.arm();
  Journal* record = opened.journal.get();
  opened.group.on_members_changed = [record](const std::vector<GroupMember>& members) {
    return record->update(journal_targets(members));
  };
  return opened;
}

}  // namespace stasis
