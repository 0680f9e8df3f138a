// Long because what is locked, kept still, checkpointed and rolled back is one list of processes.
#include "checkpoint/process_tree.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/own_helpers.h"
#include "base/processors.h"
#include "base/threads.h"
#include "base/trace.h"
#include "base/units.h"
#include "proc/memory_cgroup.h"
#include "proc/zero_pages.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

// The first slice is short, so that a tree that cannot be locked is let go soon; each is twice as
// long, because a process with seconds of queued kernels needs one long slice: in a short one its
// queue fills again. On two ranks of a loop of all-reduces the first try was enough in 24 of 24
// rounds (4-52 ms, H100, driver 580).
constexpr milliseconds kFirstSlice{500};
// A single process holds up no other, unless its own threads wait for each other on its GPUs: then
// a slice in which some have launched what they wait in, and others have not, is lost.
constexpr milliseconds kFirstSliceOfOne{250};
constexpr milliseconds kLongestSlice{8000};
// Between slices those that wait for the lock get their turn; jitter keeps tools from meeting
// again.
constexpr int kPauseMinMs = 2;
constexpr int kPauseMaxMs = 20;
constexpr milliseconds kProgressInterval{100};
// What must stay free on the host beyond the copy of the GPU's memory.
constexpr std::uint64_t kHostReserve = 256ULL << 20;
// What a CUDA context takes at least (driver 580 on an H100: 520-620 MB).
constexpr std::uint64_t kLeastContext = 512ULL << 20;
// What must stay free within a memory cgroup.
constexpr std::uint64_t kCgroupReserve = 16ULL << 20;

// Of those that look for zeros in one process: 8 read 68 GB/s out of one, 16 read 88 (H100
// machine).
constexpr unsigned kMostSearchers = 8;

// For a while a process that dies is neither alive nor reported dead by its pidfd.
bool has_gone(const Process& process, const Error& answer) {
  return !process.alive() || answer.code == ErrorCode::kProcessGone;
}

// A process that has just been forked is a copy of its parent, until the driver's code for that has
// run in it: asked then, it may answer as the parent. But no thread but one is in it.
bool is_its_parents_copy(const Process& process, const proc::ProcFs& procfs) {
  const auto thread = process.restore_thread_id();
  if (!thread) return true;
  const std::vector<Tid> threads = procfs.threads(process.pid());
  return std::find(threads.begin(), threads.end(), *thread) == threads.end();
}

// What the process is in. One that is just being forked, or is about to end, may leave the driver
// without an answer, or with a wrong one: a little later it is either gone or gives the right one.
Result<std::optional<CudaState>> ask_with_deadline(const Process& process, bool forked_from_cuda,
                                                   const proc::ProcFs& procfs,
                                                   proc::FrozenCgroups& cgroups) {
  constexpr milliseconds kTimeout{500};
  constexpr milliseconds kPause{10};
  const auto start = Clock::now();
  for (;;) {
    auto state = process.cuda_state(&cgroups);
    const bool unsure =
        state ? state->has_value() && forked_from_cuda && is_its_parents_copy(process, procfs)
              : state.error().code == ErrorCode::kDriverError && !has_gone(process, state.error());
    if (!unsure) return state;
    if (Clock::now() - start > kTimeout) {
      // A process for which the driver names no restore thread does not use CUDA.
      if (state && !process.restore_thread_id()) return std::optional<CudaState>();
      return state;
    }
    std::this_thread::sleep_for(kPause);
  }
}

// Of a job that suspends itself by a tool that it starts. The tool calls the driver, so it is one
// of those that use CUDA, and so are the helpers that it starts; locked, none of them would come
// back.
void leave_out_ourselves(std::vector<proc::ProcessInfo>& tree) {
  const Pid self{::getpid()};
  const Pid root = tree.front().pid;
  const std::set<Pid> helpers = own_helpers();
  std::set<Pid> ours;
  std::erase_if(tree, [&](const proc::ProcessInfo& info) {  // parents come before children
    const bool helps =
        (info.parent == self && helpers.contains(info.pid)) || ours.contains(info.parent);
    if (helps) ours.insert(info.pid);
    return helps || (info.pid == self && self != root);
  });
}

// A tool that waits in its own next call of CUDA unlocks no process.
Result<void> refuse_ourselves(const Process& process) {
  if (process.pid().value != ::getpid()) return {};
  return fail(
      ErrorCode::kUsage,
      fmt::format("process {} uses CUDA and cannot do this to itself: locked, it would wait "
                  "for its own unlock",
                  process.pid().value),
      "have another process do it, which may be started by this one");
}

void pause_with_jitter() {
  static thread_local std::mt19937 random(std::random_device{}());
  std::this_thread::sleep_for(
      milliseconds(std::uniform_int_distribution<int>(kPauseMinMs, kPauseMaxMs)(random)));
}

}  // namespace

Result<ProcessTree> ProcessTree::open(Driver& driver, Pid root, proc::ProcFs procfs) {
  ProcessTree tree(driver, std::move(procfs));
  tree.armed_ = false;  // nothing has been done yet
  STASIS_TRY(tree.refresh(root));
  tree.armed_ = true;
  return tree;
}

ProcessTree::~ProcessTree() {
  if (armed_ && !members_.empty()) (void)roll_back();
}

std::size_t ProcessTree::cuda_count() const {
  return static_cast<std::size_t>(std::count_if(
      members_.begin(), members_.end(), [](const TreeMember& m) { return m.initial.has_value(); }));
}

std::vector<proc::ProcessInfo> ProcessTree::infos() const {
  std::vector<proc::ProcessInfo> out;
  for (const TreeMember& member : members_)
    out.push_back(member.process.info());
  return out;
}

std::uint64_t ProcessTree::gpu_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [pid, uses] : gpu_use_)
    sum += total_bytes(uses);
  return sum;
}

std::vector<GpuUse> ProcessTree::gpu_use_of(Pid pid) const {
  const auto use = gpu_use_.find(pid);
  return use != gpu_use_.end() ? use->second : std::vector<GpuUse>();
}

Result<bool> ProcessTree::begins_to_use_cuda(TreeMember& member, proc::FrozenCgroups& cgroups) {
  if (member.initial) return false;
  auto state = ask_with_deadline(member.process, false, procfs_, cgroups);
  if (!state && has_gone(member.process, state.error())) return false;
  if (!state) return fail(std::move(state.error()));
  if (!*state) return false;
  STASIS_TRY(refuse_ourselves(member.process));
  member.initial = **state;
  return true;
}

Result<std::optional<TreeMember>> ProcessTree::open_member(const proc::ProcessInfo& info, Pid root,
                                                           proc::FrozenCgroups& cgroups) {
  const bool is_root = info.pid == root;
  if (info.has_ended() && !is_root) return std::nullopt;
  auto process = Process::open(*driver_, info.pid, procfs_);
  if (!process) {
    const ErrorCode code = process.error().code;
    if (!is_root && (code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie))
      return std::nullopt;
    return fail(std::move(process.error()));
  }
  const auto parent = std::find_if(members_.begin(), members_.end(), [&](const TreeMember& m) {
    return m.process.pid() == info.parent;
  });
  const bool forked_from_cuda = parent != members_.end() && parent->initial;
  auto state = ask_with_deadline(*process, forked_from_cuda, procfs_, cgroups);
  if (!state) {
    if (!is_root && has_gone(*process, state.error())) return std::nullopt;
    return fail(std::move(state.error()));
  }
  if (*state) STASIS_TRY(refuse_ourselves(*process));
  return TreeMember{std::move(*process), *state};
}

Result<bool> ProcessTree::refresh(Pid root) {
  const auto gone = [&] {
    const proc::ProcessInfo& info = members_.front().process.info();
    return fail(ErrorCode::kProcessGone,
                fmt::format("process {} ({}) has ended meanwhile", info.pid.value, info.comm),
                "start the program again, or restore it from an image");
  };
  if (!members_.empty() && !members_.front().process.alive()) return gone();
  const KeptCallThread calls;
  auto infos = procfs_.tree(root);
  // Its number may mean another process by now.
  if (!members_.empty() && !members_.front().process.alive()) return gone();
  if (!infos) return fail(std::move(infos.error()));
  leave_out_ourselves(*infos);
  // A shell starts a process for every line, and each is a descriptor here.
  std::erase_if(members_, [&](const TreeMember& member) {
    return !member.initial && member.process.pid() != root && !member.process.alive();
  });
  bool changed = false;
  bool more_cuda = false;
  proc::FrozenCgroups cgroups;
  for (const proc::ProcessInfo& info : *infos) {
    const auto known = std::find_if(members_.begin(), members_.end(), [&](const TreeMember& m) {
      return m.process.id() == info.id();
    });
    if (known != members_.end()) {
      STASIS_TRY_ASSIGN(const bool begins, begins_to_use_cuda(*known, cgroups));
      changed = changed || begins;
      more_cuda = more_cuda || begins;
      continue;
    }
    STASIS_TRY_ASSIGN(auto added, open_member(info, root, cgroups));
    if (!added) continue;
    changed = true;
    more_cuda = more_cuda || added->initial;
    members_.push_back(std::move(*added));
  }
  if (changed && on_members_changed) {
    STASIS_TRY(on_members_changed(members_));
  }
  return more_cuda;
}

Result<void> ProcessTree::quiesce_all(Tries& tries, milliseconds timeout,
                                      const Interrupt& interrupt) {
  std::vector<Rank*> ranks;
  std::deque<LockedRank> locked;
  for (TreeMember& member : members_) {
    if (member.initial != CudaState::kRunning || !member.process.alive()) continue;
    if (const auto gate = tries.gates.find(member.process.pid()); gate != tries.gates.end()) {
      ranks.push_back(gate->second);
      continue;
    }
    // A second lock, for one that has come during the checkpoint, leaves the others alone.
    const auto state = member.process.cuda_state();
    if (state && *state == CudaState::kCheckpointed) continue;
    ranks.push_back(&locked.emplace_back(member.process));
  }
  if (tries.slice == milliseconds(0))
    tries.slice = ranks.size() == 1 ? kFirstSliceOfOne : kFirstSlice;
  for (Result<void> late;;) {
    STASIS_TRY(interrupt.check());
    milliseconds slice = tries.slice;
    if (timeout.count() > 0) {
      const auto left = timeout - std::chrono::floor<milliseconds>(Clock::now() - tries.start);
      if (left.count() <= 0) {
        return fail(
            ErrorCode::kTimeout,
            fmt::format("the GPU work of process {} and what is below it did not end within "
                        "{} ms: all of it runs on{}",
                        root().value, timeout.count(),
                        late ? "" : fmt::format(" (at last: {})", late.error().message)),
            "give it more time (--timeout), or try when fewer kernels are in flight");
      }
      slice = std::min(slice, left);
    }
    tries.standing(true);
    QuiesceRound round = quiesce_ranks(ranks, slice, interrupt, parks_ && !behind_gates_);
    tries.count += round.tries;
    if (round.all_quiesced) return {};
    tries.standing(false);
    if (!round.result) return std::move(round.result);
    late = std::move(round.late);
    pause_with_jitter();
    tries.slice = std::min(tries.slice * 2, kLongestSlice);
  }
}

Result<void> ProcessTree::hold_back(const Gates& gates, milliseconds timeout,
                                    const Interrupt& interrupt,
                                    const std::function<void(bool)>& standing) {
  Tries tries{gates, standing};
  auto done = quiesce_all(tries, timeout, interrupt);
  behind_gates_ = done.has_value();
  return done;
}

Result<void> ProcessTree::lock(milliseconds timeout, const Interrupt& interrupt) {
  const Gates none;
  // While gates are closed no process is let go on, not even for a moment.
  Tries tries{none, [](bool) {}};
  if (behind_gates_) tries.slice = kLongestSlice;
  for (;;) {
    auto done = quiesce_all(tries, timeout, interrupt);
    lock_tries_ += std::exchange(tries.count, 0);
    if (!done) return done;
    STASIS_TRY_ASSIGN(auto more, refresh(root()));
    if (!more) return {};
    // New processes: they are locked in the next round, the others are already.
  }
}

namespace {

Error once_more(const Process& process, const char* what) {
  Error error{ErrorCode::kBusy,
              fmt::format("process {} ({}) {}", process.pid().value, process.info().comm, what),
              "try again"};
  error.retry = Retry::kSame;
  return error;
}
Error another_program(const Process& process) {
  return once_more(process, "has just become another program (exec)");
}
Error runs_again(const Process& process) {
  return once_more(process, "runs again: it is another program (exec), or another tool acts on it");
}

}  // namespace

Result<std::vector<Process*>> ProcessTree::members_in(CudaState wanted, IfGone if_gone) {
  std::vector<Process*> selected;
  for (TreeMember& member : members_) {
    if (!member.initial || !member.process.alive()) continue;
    auto state = member.process.cuda_state();
    if (!state) {
      if (state.error().code == ErrorCode::kProcessGone) continue;
      return fail(std::move(state.error()));
    }
    if (*state == wanted) selected.push_back(&member.process);
    // No lock has reached what runs by now, or does not use CUDA any more.
    const bool is_another = wanted == CudaState::kLocked && if_gone == IfGone::kFail &&
                            (!*state || *state == CudaState::kRunning);
    if (is_another && !procfs_.is_ending(member.process.pid()))
      return fail(*state ? runs_again(member.process) : another_program(member.process));
  }
  return selected;
}

Result<void> ProcessTree::in_parallel(CudaState wanted,
                                      const std::function<Result<void>(Process&)>& act,
                                      std::string_view phase, Progress& progress, IfGone if_gone) {
  STASIS_TRY_ASSIGN(const auto selected, members_in(wanted, if_gone));
  // The driver keeps the content in the target's own memory: its growth is the progress.
  const auto resident = [&] {
    std::uint64_t sum = 0;
    for (const Process* process : selected) {
      if (auto bytes = procfs_.resident_bytes(process->pid())) sum += *bytes;
    }
    return sum;
  };
  const std::uint64_t before = resident();
  std::vector<Result<void>> results(selected.size());
  std::atomic<std::size_t> running = selected.size();
  const auto act_on = [&](std::size_t i) {
    results[i] = act(*selected[i]);
    --running;
  };
  at_once(selected.size(), act_on, [&] {
    const auto start = Clock::now();
    auto told = start;
    while (running.load() > 0) {
      // Short steps at first: a small job is done within milliseconds.
      std::this_thread::sleep_for(Clock::now() - start < milliseconds(200) ? milliseconds(1)
                                                                           : milliseconds(10));
      if (Clock::now() - told < kProgressInterval) continue;
      told = Clock::now();
      const std::uint64_t now = resident();
      progress.update(phase, now > before ? now - before : before - now, gpu_bytes());
    }
  });
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i]) continue;
    if (if_gone == IfGone::kPass && results[i].error().code == ErrorCode::kProcessGone) continue;
    if (if_gone == IfGone::kPass && !selected[i]->alive()) continue;
    return std::move(results[i]);
  }
  return {};
}

Result<void> ProcessTree::park_threads() {
  if (!parks_) return {};
  NoProgress quiet;
  return in_parallel(
      CudaState::kLocked,
      [this](Process& process) {
        return process.park_threads(agents_at_work_.contains(process.pid()));
      },
      "lock", quiet);
}

Result<void> ProcessTree::note_programs() {
  programs_.clear();
  for (const TreeMember& member : members_) {
    const Process& process = member.process;
    if (!member.initial || !process.alive()) continue;
    auto space = proc::AddressSpace::open(process.pid());
    if (space)
      programs_.emplace(process.pid(), std::move(*space));
    else if (process.alive() && !procfs_.is_ending(process.pid()))
      return fail(std::move(space.error()));
  }
  return {};
}

Result<void> ProcessTree::verify_programs() const {
  for (const TreeMember& member : members_) {
    const auto program = programs_.find(member.process.pid());
    if (program == programs_.end() || !member.process.alive()) continue;
    auto same = program->second.check_current();
    if (same || !member.process.alive() || procfs_.is_ending(member.process.pid())) continue;
    if (same.error().code != ErrorCode::kProcessGone) return same;
    return fail(another_program(member.process));
  }
  return {};
}

void ProcessTree::note_use(Pid pid, const std::vector<GpuUse>& use) {
  auto& known = gpu_use_[pid];
  if (total_bytes(use) >= total_bytes(known)) known = use;
}

Result<std::map<Pid, std::vector<GpuUse>>> ProcessTree::members_use() const {
  STASIS_TRY_ASSIGN(auto all, driver_->memory_by_process());
  std::map<Pid, std::vector<GpuUse>> use;
  std::map<GpuUuid, std::vector<GpuUse*>> on;
  for (const TreeMember& member : members_) {
    const auto found = all.find(member.process.pid());
    if (found == all.end()) continue;
    for (GpuUse& part : use[found->first] = std::move(found->second))
      on[part.gpu].push_back(&part);
  }
  std::erase_if(on, [](const auto& one) { return one.second.size() < 2; });
  if (on.empty()) return use;
  const auto gpus = driver_->gpus();
  if (!gpus) return use;
  for (const Gpu& gpu : *gpus) {
    std::uint64_t sum = 0;
    for (const GpuUse* part : on[gpu.uuid])
      sum += part->bytes;
    if (gpu.memory_used == 0 || sum <= gpu.memory_used) continue;
    const double share = static_cast<double>(gpu.memory_used) / static_cast<double>(sum);
    for (GpuUse* part : on[gpu.uuid])
      part->bytes = static_cast<std::uint64_t>(share * static_cast<double>(part->bytes));
  }
  return use;
}

Result<void> ProcessTree::check_host_memory(const std::map<Pid, std::uint64_t>& elsewhere,
                                            const std::map<Pid, std::uint64_t>& at_least) {
  auto use = members_use();
  if (!use) return {};
  std::uint64_t to_move = 0;
  struct Limited {
    proc::MemoryCgroup cgroup;
    std::uint64_t to_move = 0;
  };
  std::map<std::string, Limited> limited;
  for (const TreeMember& member : members_) {
    const auto it = use->find(member.process.pid());
    if (it == use->end()) continue;
    // Those that were checkpointed before have no GPU memory now; what they had stays known.
    note_use(it->first, it->second);
    std::uint64_t bytes = 0;
    std::uint64_t least = 0;
    for (const GpuUse& part : it->second) {
      bytes += part.bytes;
      // A context's own memory is not moved.
      least += part.bytes - std::min(part.bytes, driver_->info().simulated ? 0 : kLeastContext);
    }
    if (const auto gone = elsewhere.find(it->first); gone != elsewhere.end()) {
      bytes -= std::min(bytes, gone->second);
      least -= std::min(least, gone->second);
    }
    if (const auto known = at_least.find(it->first); known != at_least.end()) {
      bytes = std::max(bytes, known->second);
      least = std::max(least, known->second);
    }
    if (bytes == 0) continue;
    to_move += bytes;
    for (proc::MemoryCgroup& cgroup : proc::memory_cgroups(it->first)) {
      Limited& entry = limited[cgroup.directory];
      entry.to_move += least;
      entry.cgroup = std::move(cgroup);
    }
  }
  const auto available = procfs_.memory_available();
  if (available && to_move > 0 && to_move + kHostReserve > *available) {
    return fail(
        refusal({"host-memory",
                 Severity::kRed,
                 {},
                 fmt::format("the GPU memory in use ({}) does not fit into the free memory of "
                             "this host ({})",
                             format_bytes(to_move), format_bytes(*available)),
                 "the driver moves GPU memory into the process's own memory: free some, or give "
                 "the host more"},
                ErrorCode::kOutOfHostMemory));
  }
  for (const auto& [directory, entry] : limited) {
    const std::uint64_t room = entry.cgroup.room(procfs_.swap_free().value_or(0));
    if (entry.to_move + kCgroupReserve <= room) continue;
    return fail(
        refusal({"host-memory",
                 Severity::kRed,
                 {},
                 fmt::format("the GPU memory in use ({}) does not fit under the memory limit of "
                             "{} ({}, of which {} are free)",
                             format_bytes(entry.to_move), directory,
                             format_bytes(entry.cgroup.limit), format_bytes(room)),
                 "the driver moves GPU memory into the process's own memory, and the kernel kills "
                 "what goes over the limit: raise the memory limit of the container or the job by "
                 "as much as it has GPU memory"},
                ErrorCode::kOutOfHostMemory));
  }
  return {};
}

Result<void> ProcessTree::checkpoint(Progress& progress, const Interrupt& interrupt) {
  STASIS_TRY(check_host_memory());
  STASIS_TRY(interrupt.check());
  std::atomic<std::uint64_t> zeros = 0;
  const unsigned threads = std::clamp(
      usable_processors() / static_cast<unsigned>(std::max<std::size_t>(1, cuda_count())), 1U,
      kMostSearchers);
  const auto checkpoint_one = [&](Process& process) -> Result<void> {
    STASIS_TRY(parks_ ? process.park_threads(agents_at_work_.contains(process.pid()))
                      : Result<void>());
    if (!parks_ || !drops_zeros_) return process.checkpoint();
    const auto space = proc::AddressSpace::open(process.pid());
    const auto before = procfs_.mappings(process.pid());
    auto saved = process.checkpoint();
    if (!saved || !space || !before) return saved;
    Span span(TraceKind::kDriver, "drop zeros", process.pid());
    const std::uint64_t bytes = drop_zero_pages(*space, *before, threads);
    span.set_bytes(bytes);
    zeros += bytes;
    return {};
  };
  auto done = in_parallel(CudaState::kLocked, checkpoint_one, "checkpoint", progress);
  dropped_zero_bytes_ += zeros;
  if (!done) return done;
  return interrupt.check();
}

Result<void> ProcessTree::park_agents() {
  for (TreeMember& member : members_) {
    if (member.initial != CudaState::kRunning || !member.process.alive()) continue;
    auto still = member.process.park_agent();
    if (!still && member.process.alive()) return still;
  }
  return {};
}

Result<void> ProcessTree::restore(std::span<const GpuPair> pairs, Progress& progress) {
  return in_parallel(
      CudaState::kCheckpointed, [pairs](Process& process) { return process.restore(pairs); },
      "restore", progress);
}

Result<void> ProcessTree::unlock() {
  NoProgress quiet;
  // Another tool may have unlocked a process that this one had suspended.
  auto done = in_parallel(
      CudaState::kRunning, [](Process& process) { return process.let_go_on(); }, "unlock", quiet,
      IfGone::kPass);
  if (!done) return done;
  return in_parallel(
      CudaState::kLocked, [](Process& process) { return process.unlock(); }, "unlock", quiet,
      IfGone::kPass);
}

Result<void> ProcessTree::roll_back() {
  armed_ = false;
  std::vector<Result<void>> results(members_.size());
  at_once(members_.size(), [&](std::size_t i) {
    Process& process = members_[i].process;
    if (!members_[i].initial || LockedRank(process).gone()) return;
    StateGuard guard(process, *members_[i].initial);
    results[i] = guard.undo();
  });
  std::string messages;
  std::string remedies;
  for (const auto& result : results) {
    if (result) continue;
    messages += (messages.empty() ? "" : "; ") + result.error().message;
    remedies += (remedies.empty() ? "" : "; ") + result.error().remedy;
  }
  if (messages.empty()) return {};
  return fail(ErrorCode::kNotRolledBack, std::move(messages), std::move(remedies));
}

}  // namespace stasis
