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
void inherit_states(ProcessTree& tree, const std::vector<JournalTarget>& inherited) {
  for (TreeMember& member : tree.members()) {
    if (!member.initial) continue;
    for (const JournalTarget& left : inherited) {
      if (may_be_same(left, member.process.id())) member.initial = left.initial;
    }
  }
}

// Of those that use CUDA: others may come and go all the time.
std::vector<std::pair<Pid, CudaState>> states_of(const ProcessTree& tree) {
  std::vector<std::pair<Pid, CudaState>> states;
  for (const TreeMember& member : tree.members())
    if (member.initial) states.emplace_back(member.process.pid(), *member.initial);
  return states;
}

Error not_cuda(const ProcessTree& tree) {
  const int root = tree.root().value;
  const std::size_t others = tree.members().size() - 1;
  if (const auto owner = tree.members().front().process.lives_in_memory_of()) {
    return {ErrorCode::kNotCuda,
            fmt::format("process {} runs in the memory of its parent, process {} (vfork, or clone "
                        "with CLONE_VM), and has no CUDA of its own",
                        root, owner->value),
            fmt::format("give process {}", owner->value)};
  }
  return {ErrorCode::kNotCuda,
          others == 0   ? fmt::format("process {} does not use CUDA", root)
          : others == 1 ? fmt::format("neither process {} nor the one below it uses CUDA", root)
                        : fmt::format("neither process {} nor any of the {} below it uses CUDA",
                                      root, others),
          "if it was started just now, wait until it uses its GPU; `stasis ps` lists the processes "
          "that use CUDA"};
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
Result<void> finish_stillness_of(const Environment& env, const ProcessTree& tree) {
  for (const TreeMember& member : tree.members())
    if (member.initial == CudaState::kRunning) STASIS_TRY(finish_stillness(env, member.process));
  return {};
}

// By what the processes themselves say: the record of the dump that was cut short may be another
// user's, or of another namespace.
Result<void> check_host_memory_of(const ProcessTree& tree,
                                  const std::optional<JournalRecord>& left) {
  for (const TreeMember& member : tree.members()) {
    if (member.initial != CudaState::kCheckpointed) continue;
    auto there = check_host_memory_is_there(member.process.pid());
    if (there || there.error().code == ErrorCode::kProcessGone) continue;
    if (left) there.error().remedy = fmt::format("`stasis recover {}`", left->root.value);
    return there;
  }
  return {};
}

// How a tree comes into the journal, step by step.
class Opening {
 public:
  // The references outlive it.
  Opening(const Environment& env, Operation operation, Pid root, const std::string& image,
          bool without_cuda)
      : env_(env), operation_(operation), root_(root), image_(image), without_cuda_(without_cuda) {}

  Result<OpenedTree> run(const ImageContent* content, std::span<const GpuMapEntry> gpu_map) {
    STASIS_TRY(lock());
    STASIS_TRY(probe());
    STASIS_TRY(check_what_was_left(content));
    set_fault_target(root_);
    STASIS_TRY(begin(gpu_map));
    STASIS_TRY(finish_what_was_left());
    STASIS_TRY(enter());
    if (auto allowed = fault(FaultPoint::kGroupOpened); !allowed)
      return fail(given_up(std::move(allowed.error())));
    OpenedTree opened{std::move(locks_), std::move(journal_), {}, std::move(*tree_)};
    opened.tree.arm();
    Journal* record = opened.journal.get();
    opened.tree.on_members_changed = [record](const std::vector<TreeMember>& members) {
      return record->update(journal_targets(members));
    };
    return opened;
  }

 private:
  // Before the driver is asked, which keeps its asker waiting while another tool's call goes on.
  Result<void> lock() {
    STASIS_TRY_ASSIGN(auto infos, proc::ProcFs().tree(root_));
    for (const proc::ProcessInfo& info : infos)
      targets_.push_back({info.id(), CudaState::kRunning});
    STASIS_TRY(check_descriptors(targets_.size()));
    STASIS_TRY(check_not_busy(targets_));
    std::vector<Pid> numbers;
    for (const JournalTarget& one : targets_)
      numbers.push_back(one.pid);
    STASIS_TRY_ASSIGN(locks_, lock_processes(numbers));
    return {};
  }

  // No record is made for what is not there, or not CUDA.
  Result<void> probe() {
    STASIS_TRY_ASSIGN(auto opened, ProcessTree::open(env_.driver, root_));
    opened.dismiss();
    tree_.emplace(std::move(opened));
    if (tree_->cuda_count() == 0 && !without_cuda_) return fail(not_cuda(*tree_));
    for (const TreeMember& member : tree_->members()) {
      if (member.initial == CudaState::kFailed) return fail(failed_state(member.process));
    }
    return {};
  }

  // Before there is a record of ours, which would replace the one that says where that image is.
  Result<void> check_what_was_left(const ImageContent* content) {
    const auto left = left_behind(targets_);
    // A resume looks where that one did, and says so in its record. Where neither was told, that is
    // in the images that are remembered.
    const bool looks_there = left && left->operation == Operation::kResume &&
                             operation_ == Operation::kResume && left->image == image_;
    const bool goes_on = looks_there && !image_.empty();
    STASIS_TRY(finish_stillness_of(env_, *tree_));
    STASIS_TRY(check_host_memory_of(*tree_, left));
    if (!left || goes_on) return {};
    return check_content(*tree_,
                         fmt::format("`stasis recover {0}`; or, if the image is elsewhere now, "
                                     "`stasis resume {0} --images-dir DIR`",
                                     left->root.value),
                         content, looks_there);
  }

  Result<void> begin(std::span<const GpuMapEntry> gpu_map) {
    JournalRecord intended{operation_, root_, {}, image_, {}};
    intended.gpu_map = gpu_map_text(gpu_map);
    STASIS_TRY_ASSIGN(auto begun, Journal::begin(std::move(intended)));
    journal_ = std::make_unique<Journal>(std::move(begun));
    if (journal_->unwritten()) {
      env_.tell(
          "the state directory takes no record of this (it is full, or read-only): if this command "
          "is killed, `stasis recover --all` cannot find the processes");
    }
    return {};
  }

  Result<void> finish_what_was_left() {
    if (journal_->inherited().empty()) return {};
    auto ready = wait_for_criu(env_, journal_->left());
    if (ready) put_terminals_right(env_, journal_->left());
    if (ready) ready = settle(env_, journal_->inherited());
    if (ready) ready = probe();
    if (!ready) {
      journal_->finish();
      return ready;
    }
    if (writes_image(journal_->left().operation))
      (void)clear_or_tell(env_, journal_->left().image, false);
    return {};
  }

  // What we saw before the journal was ours may be what another operation, which has ended since,
  // was just doing. So look until what we have entered is what there is.
  Result<void> enter() {
    for (bool same = false; !same;) {
      inherit_states(*tree_, journal_->inherited());
      const auto entered = states_of(*tree_);
      auto done = journal_->update(journal_targets(tree_->members()));
      if (done) done = probe();
      if (!done) return fail(given_up(std::move(done.error())));
      inherit_states(*tree_, journal_->inherited());
      same = states_of(*tree_) == entered;
    }
    return {};
  }

  // What a killed operation has left is entered as ours by now: then the record stays.
  Error given_up(Error why) {
    if (journal_->inherited().empty()) journal_->finish();
    return why;
  }

  const Environment& env_;
  const Operation operation_;
  const Pid root_;
  const std::string& image_;
  const bool without_cuda_;
  std::vector<JournalTarget> targets_;
  std::vector<UniqueFd> locks_;  // process_lock.h
  std::optional<ProcessTree> tree_;
  std::unique_ptr<Journal> journal_;
};

}  // namespace

Result<OpenedTree> open_tree(const Environment& env, Operation operation, Pid root,
                             const std::string& image, bool without_cuda,
                             const ImageContent* content, std::span<const GpuMapEntry> gpu_map) {
  return Opening(env, operation, root, image, without_cuda).run(content, gpu_map);
}

}  // namespace stasis
