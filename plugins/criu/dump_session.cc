// SPDX-License-Identifier: GPL-2.0-or-later
// Long because what CRIU calls one after the other shares what is locked, and the way back from
// each.
#include "dump_session.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "attach_first.h"
#include "base/fd.h"
#include "base/units.h"
#include "checkpoint/driver_obstacles.h"
#include "checkpoint/inherited_files.h"
#include "checkpoint/journal.h"
#include "checkpoint/stopped_process.h"
#include "criu/criu_files.h"
#include "criu_api.h"
#include "direct/agent_client.h"
#include "direct/held_neighbours.h"
#include "direct/left_to_driver.h"
#include "direct/sharing.h"
#include "direct/unknown_sharing.h"
#include "direct/unrestorable_memory.h"
#include "gpu_record.h"
#include "held_tree.h"
#include "proc/file_state.h"
#include "proc/parking.h"
#include "proc/stopped_threads.h"
#include "proc/tcp_ports.h"
#include "proc/tiles.h"

namespace stasis::plugin {
namespace {

using std::chrono::milliseconds;

// A process that has begun to use CUDA between the lock and CRIU's seizing it has all threads
// stopped: its GPU work ends by itself or not at all.
constexpr milliseconds kLateLock{2000};

constexpr const char* kIgnoreVariable = "STASIS_IGNORE_OBSTACLES";
bool ignores_obstacles() {
  const char* set = std::getenv(kIgnoreVariable);
  return set != nullptr && std::string_view(set) == "1";
}

struct LockTime {
  milliseconds for_driver;  // what the lock may take
  milliseconds in_all;      // when we stop waiting for a driver that does not answer
};

// CRIU sets an alarm (--timeout, 10 s) before it calls us. When it rings CRIU gives up, and the
// ways out of here need some time as well.
LockTime lock_time() {
  constexpr milliseconds kWithoutAlarm{10000};
  constexpr milliseconds kGrace{1500};
  itimerval left{};
  if (::getitimer(ITIMER_REAL, &left) != 0 ||
      (left.it_value.tv_sec == 0 && left.it_value.tv_usec == 0)) {
    return {kWithoutAlarm, kWithoutAlarm + kGrace};
  }
  const milliseconds all(left.it_value.tv_sec * 1000 + left.it_value.tv_usec / 1000);
  return {all * 6 / 10, all * 75 / 100};
}

Error no_answer(milliseconds limit, Pid root) {
  return {ErrorCode::kNoAnswer,
          fmt::format("the driver has not answered for {} s",
                      std::chrono::duration_cast<std::chrono::seconds>(limit).count()),
          fmt::format("see `dmesg` for messages of the NVIDIA driver; when criu has ended, run "
                      "`stasis recover {}`",
                      root.value)};
}

}  // namespace

struct DumpSession::State {
  explicit State(std::shared_ptr<Driver> used) : driver(std::move(used)) {}

  std::shared_ptr<Driver> driver;
  std::optional<Journal> journal;
  std::optional<ProcessTree> tree;
  Interrupt interrupt;
  NoProgress progress;
  UnrestorableMemory unrestorable;
  bool all_restorable = false;  // what agents can give up is gone now, or was not there

  std::set<Pid> looked_at;
  bool asked_inside = false;
  std::vector<std::string> ignored;  // obstacles that the user knows better than

  std::mutex mutex;
  bool lock_ended = false;
  bool given_up = false;  // the hook no longer waits for the worker
  std::vector<JournalTarget> targets;

  Result<void> lock(Pid root, milliseconds timeout);
  Result<void> lock_once(Pid root, milliseconds timeout);
  Result<void> enter_journal();
  Result<void> refuse_obstacles();
  Result<void> give_up_unrestorable(milliseconds timeout);
  Result<void> refuse_losses() const;
  Result<void> refuse_late_losses() const;
  Result<void> replace_inherited(bool now);
  Result<void> refuse_late_workers();
  Result<void> refuse_tiles() const;
  Result<void> refuse_owner_threads() const;
  Result<void> checkpoint();
  Result<void> roll_back();
  bool has_cuda() const { return tree && tree->cuda_count() > 0; }
};

// Before anything is done to a process.
Result<void> DumpSession::State::enter_journal() {
  const auto& members = tree->members();
  for (const TreeMember& member : members) {
    if (member.initial != CudaState::kCheckpointed) continue;
    auto there = check_host_memory_is_there(member.process.pid());
    if (!there && there.error().code != ErrorCode::kProcessGone) return there;
  }
  for (const TreeMember& member : members) {
    const auto agent = direct::probe_agent(member.process.pid());
    if (!agent || !*agent) continue;
    if ((*agent)->half_way) {
      return fail(
          ErrorCode::kWrongState,
          fmt::format("process {} is half-way suspended: the tool that began it was killed",
                      member.process.pid().value),
          fmt::format("make it run first: `stasis recover {}`", member.process.pid().value));
    }
    if ((*agent)->content_id == direct::ContentId{}) continue;
    return fail(ErrorCode::kBusy,
                fmt::format("the content of process {}'s GPU memory is in an image of Stasis and "
                            "would not be in this one",
                            member.process.pid().value),
                fmt::format("bring it back first: `stasis resume {}`", member.process.pid().value));
  }
  const bool all_suspended = std::all_of(members.begin(), members.end(), [](const auto& member) {
    return !member.initial || *member.initial == CudaState::kCheckpointed;
  });
  // Suspended by another tool, which keeps it so; it may be in the journal of that tool.
  if (all_suspended) return {};
  for (const TreeMember& member : members) {
    if (member.initial != CudaState::kFailed) continue;
    return fail(ErrorCode::kFailedState,
                fmt::format("the driver says that the CUDA state of process {} has failed",
                            member.process.pid().value),
                "end the process, and restore it from an image if there is one");
  }
  if (!journal) {
    STASIS_TRY_ASSIGN(auto begun, Journal::begin({Operation::kCriuDump, tree->root(), {}, {}, {}}));
    journal.emplace(std::move(begun));
    if (!journal->inherited().empty()) {
      journal->finish();
      journal.reset();
      return fail(ErrorCode::kBusy,
                  fmt::format("an operation on process {} was cut short and has left its mark",
                              tree->root().value),
                  fmt::format("run `stasis recover {}` first", tree->root().value));
    }
  }
  auto done = refuse_obstacles();
  if (done) done = journal->update(journal_targets(members));
  if (!done) return done;
  const std::scoped_lock guard(mutex);
  targets = journal_targets(members);
  return {};
}

// What the driver would refuse half-way, or take and never give back.
Result<void> DumpSession::State::refuse_obstacles() {
  std::vector<proc::ProcessInfo> fresh;
  for (const TreeMember& member : tree->members()) {
    if (member.initial && *member.initial != CudaState::kCheckpointed &&
        looked_at.insert(member.process.pid()).second) {
      fresh.push_back(member.process.info());
    }
  }
  STASIS_TRY_ASSIGN(auto found, find_obstacles(*driver, proc::ProcFs(), fresh));
  // The agents do, or refuse it.
  (void)drop_lifted(found, all_restorable);
  // Once, before anything is done: while the driver holds them it does not answer there.
  if (!std::exchange(asked_inside, true) && !ignores_obstacles()) {
    for (Obstacle& one : find_unknown_sharing(tree->members(), driver->info().simulated)) {
      if (one.severity == Severity::kRed)
        found.push_back(std::move(one));
      else
        ignored.push_back(fmt::format("process {}: {}", one.pid.value, one.what));
    }
  }
  if (found.empty()) return {};
  Error why = describe_obstacles(found, fresh);
  if (ignores_obstacles()) {
    ignored.push_back(std::move(why.message));
    return {};
  }
  why.remedy += fmt::format("; if you know better: {}=1 in criu's environment", kIgnoreVariable);
  return fail(std::move(why));
}

// A program may begin to share memory between any two steps.
Result<void> DumpSession::State::lock(Pid root, milliseconds timeout) {
  constexpr int kTries = 5;
  const auto start = Clock::now();
  for (int tries = 1;; ++tries) {
    const auto left = timeout - std::chrono::floor<milliseconds>(Clock::now() - start);
    auto done = lock_once(root, std::max(left, milliseconds(1)));
    if (done || done.error().retry != Retry::kSame || tries == kTries) return done;
    STASIS_TRY(interrupt.check());
  }
}

Result<void> DumpSession::State::lock_once(Pid root, milliseconds timeout) {
  all_restorable = false;
  STASIS_TRY_ASSIGN(auto opened, ProcessTree::open(*driver, root));
  tree.emplace(std::move(opened));
  tree->on_members_changed = [this](const auto&) { return enter_journal(); };
  if (!has_cuda()) return {};
  auto done = enter_journal();
  // Once before anything is done, for what is refused.
  if (done) done = replace_inherited(false);
  const auto start = Clock::now();
  if (done) done = give_up_unrestorable(timeout);
  all_restorable = true;
  // What the gates have held back is locked at once.
  const auto left = timeout - std::chrono::floor<milliseconds>(Clock::now() - start);
  if (done) done = tree->lock(std::max(left, kLateLock), interrupt);
  // Once it is locked it gets no more from others.
  if (done) done = refuse_losses();
  if (done) done = replace_inherited(true);
  if (!done && journal) {
    STASIS_TRY(roll_back());
  }
  return done;
}

// What the driver cannot restore, and agents can give up while their programs run.
Result<void> DumpSession::State::give_up_unrestorable(milliseconds timeout) {
  auto done = unrestorable.give_up({*driver, interrupt, progress, {}}, *tree, timeout);
  if (done || done.error().code == ErrorCode::kNotRolledBack) return done;
  if (done.error().code != ErrorCode::kNotSupported) return done;
  if (ignores_obstacles()) {
    ignored.push_back(std::move(done.error().message));
    return {};
  }
  done.error().remedy +=
      fmt::format("; if you know better: {}=1 in criu's environment", kIgnoreVariable);
  return done;
}

// Of processes that have begun to use CUDA since: CRIU holds their agents.
Result<void> DumpSession::State::refuse_late_losses() const {
  if (ignores_obstacles()) return {};
  for (const TreeMember& member : tree->members()) {
    const Pid pid = member.process.pid();
    if (member.initial != CudaState::kRunning || !member.process.alive()) continue;
    const auto agent = direct::probe_agent(pid);
    if (agent && *agent && direct::is_away((*agent)->state)) continue;
    if (!direct::says_it_shares(pid)) continue;
    return fail(refusal(
        {"imported-memory", Severity::kRed, pid,
         fmt::format("process {} has begun to share GPU memory with others just now", pid.value),
         "dump once more"},
        ErrorCode::kBusy));
  }
  return {};
}

// What agents say of the memory of their programs. Later CRIU holds their threads.
Result<void> DumpSession::State::refuse_losses() const {
  if (ignores_obstacles()) return {};
  for (const TreeMember& member : tree->members()) {
    if (!member.initial || *member.initial == CudaState::kCheckpointed) continue;
    if (!member.process.alive()) continue;
    auto may = refuse_loss_by_driver(member.process);
    if (may) continue;
    // What it shared before has been given up, or refused.
    may.error().code = ErrorCode::kBusy;
    may.error().retry = Retry::kSame;
    may.error().remedy = "dump once more; " + may.error().remedy;
    return may;
  }
  return {};
}

// What processes without CUDA have from those that forked them. `now`, or only whether it can be.
Result<void> DumpSession::State::replace_inherited(bool now) {
  STASIS_TRY_ASSIGN(auto found,
                    find_inherited_files(proc::ProcFs(), tree->members(), driver->info().simulated,
                                         ignores_obstacles()));
  if (!now) return {};
  return replace_inherited_files(found, journal ? &*journal : nullptr);
}

// Workers that were forked between the lock and CRIU's seizing the tree have such files too, and
// CRIU would refuse them. Before the checkpoint their parents still have theirs, so the next dump
// knows them.
Result<void> DumpSession::State::refuse_late_workers() {
  STASIS_TRY_ASSIGN(auto found,
                    find_inherited_files(proc::ProcFs(), tree->members(), driver->info().simulated,
                                         ignores_obstacles()));
  if (found.empty()) return {};
  return fail(ErrorCode::kBusy,
              fmt::format("process {} ({}) was forked from one that uses CUDA while that was being "
                          "locked",
                          found.front().process.pid.value, found.front().process.comm),
              "dump once more");
}

Result<void> DumpSession::State::roll_back() {
  auto back = tree->roll_back();
  if (back) back = unrestorable.take_back();
  if (back && journal) {
    journal->finish();
    journal.reset();
  }
  return back;
}

DumpSession::DumpSession(std::shared_ptr<Driver> driver)
    : state_(std::make_shared<State>(std::move(driver))) {}

DumpSession::~DumpSession() {
  // Nothing is undone by accident: finish() and settle() have seen to it, or the journal stands.
  const std::scoped_lock guard(state_->mutex);
  if (!state_->given_up && state_->tree) state_->tree->dismiss();
}

int DumpSession::answer(Pid pid) const {
  for (const TreeMember& member : state_->tree->members()) {
    if (member.process.pid() == pid && member.initial) return 0;
  }
  return -ENOTSUP;
}

int DumpSession::pause(Pid pid) {
  if (!root_) {
    root_ = pid;
    auto done = bring_agents();
    if (done) done = lock_tree();
    if (!done) {
      log_error("the tree cannot be dumped", done.error());
      return -1;
    }
    locked_ = true;
    for (const std::string& obstacle : state_->ignored)
      log_warning("going on in spite of this: " + obstacle);
  }
  return locked_ ? answer(pid) : -1;
}

// Where the user asks for it, and a program of the tree runs.
Result<void> DumpSession::bring_agents() {
  STASIS_TRY_ASSIGN(auto options, asked_attach_options());
  if (options.empty()) return {};
  const auto runs = std::make_shared<std::atomic<bool>>(false);
  std::vector<proc::AwakeThread> awake_threads;
  const auto look = [driver = state_->driver, runs, root = *root_] {
    const auto tree = ProcessTree::open(*driver, root);
    if (!tree) return;
    for (const TreeMember& member : tree->members())
      if (member.initial == CudaState::kRunning) *runs = true;
  };
  // Of a driver that does not answer the lock speaks.
  if (!proc::run_beside(awake_threads, look, lock_time().for_driver) || !*runs) return {};
  if (ignores_obstacles()) options.emplace_back("--ignore-obstacles");
  return attach_first(*root_, options);
}

Result<void> DumpSession::lock_tree() {
  const LockTime time = lock_time();
  const auto result = std::make_shared<Result<void>>();
  std::vector<proc::AwakeThread> awake_threads;
  (void)proc::run_beside(
      awake_threads,
      [state = state_, result, root = *root_, time] {
        Result<void> done = state->lock(root, time.for_driver);
        const auto end = [&] {
          *result = std::move(done);
          state->lock_ended = true;
        };
        {
          const std::scoped_lock guard(state->mutex);
          if (!done || !state->interrupt.requested()) return end();
        }
        // Too late.
        done = state->roll_back();
        if (done) done = state->interrupt.check();
        const std::scoped_lock guard(state->mutex);
        end();
      },
      time.in_all);
  {
    const std::scoped_lock guard(state_->mutex);
    if (state_->lock_ended) return std::move(*result);
    state_->interrupt.request(SIGALRM);
  }
  wait_for_agents();
  {
    const std::scoped_lock guard(state_->mutex);
    if (state_->lock_ended) {
      if (*result || result->error().code != ErrorCode::kInterrupted) return std::move(*result);
      return fail(ErrorCode::kTimeout,
                  fmt::format("the memory of the tree's programs that the driver cannot restore "
                              "takes longer than CRIU's time to be given up; after {} ms they "
                              "have taken it again, and run on",
                              time.in_all.count()),
                  "give criu more time (--timeout)");
    }
    state_->given_up = true;
  }
  // The driver lets go of a process as soon as the caller of a pending lock has gone (580.159.04,
  // tests/conformance, killed_locker); criu ends now.
  unlock_one_by_one();
  const std::string still = behind_gates();
  return fail(ErrorCode::kTimeout,
              fmt::format("the driver has not answered for {} ms; {}", time.in_all.count(),
                          still.empty()
                              ? "the tree runs on"
                              : "without memory that was given up stands still: process " + still),
              fmt::format("see `dmesg` for messages of the NVIDIA driver, and `stasis ps` for what "
                          "the processes do; when criu has ended, `stasis recover {}` {}",
                          root_->value, still.empty() ? "makes sure of them" : "lets them go on"));
}

// Left while they move memory, the programs of agents would stand still. Their own time is limited.
void DumpSession::wait_for_agents() {
  constexpr milliseconds kBetween{500};
  const UnrestorableMemory& memory = state_->unrestorable;
  auto moved = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - moved < kBetween) {
    if (memory.is_moving()) {
      // CRIU ends by an abort five seconds after its alarm.
      const itimerval none{};
      (void)::setitimer(ITIMER_REAL, &none, nullptr);
      moved = std::chrono::steady_clock::now();
    }
    std::this_thread::sleep_for(milliseconds(5));
    const std::scoped_lock guard(state_->mutex);
    if (state_->lock_ended) return;
  }
}

// The processes of the tree whose agents have closed their gates and not opened them.
std::string DumpSession::behind_gates() {
  const std::scoped_lock guard(state_->mutex);
  std::string list;
  for (const JournalTarget& target : state_->targets)
    if (!threads_that_take_back(target.pid).empty())
      list += fmt::format("{}{}", list.empty() ? "" : ", ", target.pid.value);
  return list;
}

// Those that another thread has locked while it waits for one that does not answer.
void DumpSession::unlock_one_by_one() {
  constexpr milliseconds kLimit{1000};
  std::vector<JournalTarget> targets;
  {
    const std::scoped_lock guard(state_->mutex);
    targets = state_->targets;
  }
  const auto left = std::make_shared<std::atomic<std::size_t>>(targets.size());
  std::vector<proc::AwakeThread> awake_threads;
  for (const JournalTarget& target : targets) {
    const auto unlock = [driver = state_->driver, target, left] {
      auto process = Process::open(*driver, target.pid);
      if (process && process->id() == target) {
        (void)process->bring_to(target.initial);
      }
      --*left;
    };
    // Not waited for: the one that hangs hangs here too.
    (void)proc::run_beside(awake_threads, unlock, milliseconds(1));
  }
  const auto start = std::chrono::steady_clock::now();
  while (left->load() > 0 && std::chrono::steady_clock::now() - start < kLimit) {
    std::this_thread::sleep_for(milliseconds(5));
  }
}

int DumpSession::checkpoint(Pid pid) {
  if (!locked_) return root_ ? -1 : -ENOTSUP;
  if (!checkpointed_) {
    auto done = state_->refuse_tiles();
    if (done) done = state_->refuse_owner_threads();
    if (done) done = checkpoint_tree();
    if (!done) log_error("the tree cannot be dumped", done.error());
    checkpointed_ = done.has_value();
  }
  // CRIU reads the registers later, and would let timed waits end with EINTR.
  if (*checkpointed_) proc::make_calls_again(pid);
  return *checkpointed_ ? answer(pid) : -1;
}

// CRIU has stopped all threads of the tree, and run no code in them yet.
Result<void> DumpSession::State::refuse_tiles() const {
  for (const TreeMember& member : tree->members()) {
    const auto threads = proc::stopped_threads_with_tiles(member.process.pid());
    if (!threads.empty()) return fail(proc::refusal_of_tiles(member.process.pid(), threads));
  }
  return {};
}

// CRIU 4.2.1 opens files at a restore before there are threads, and fails then.
Result<void> DumpSession::State::refuse_owner_threads() const {
  for (const TreeMember& member : tree->members()) {
    const Pid pid = member.process.pid();
    for (const proc::FileState& file : proc::file_states(pid)) {
      if (file.owner_thread.value == 0) continue;
      return fail(refusal(
          {"file-owner", Severity::kRed, pid,
           fmt::format("process {} has a file that signals a thread (descriptor {}, thread {}: "
                       "F_SETOWN_EX with F_OWNER_TID), and CRIU restores no such process",
                       pid.value, file.descriptor, file.owner_thread.value),
           "dump it by `stasis dump`, or have the program let its process be signalled "
           "(F_OWNER_PID)"},
          ErrorCode::kUndumpable));
    }
  }
  return {};
}

// While CRIU holds all threads but those by which the driver acts.
Result<void> DumpSession::State::checkpoint() {
  STASIS_TRY_ASSIGN(auto more, tree->probe_again());
  tree->leave_threads_alone();
  auto done = unrestorable.check_sharers_live();
  if (done && more) done = refuse_late_losses();
  if (done && more) done = tree->lock(kLateLock, interrupt);
  // Once more: the lock may have taken seconds.
  looked_at.clear();
  if (done) done = refuse_obstacles();
  if (done) done = refuse_late_workers();
  for (const TreeMember& member : tree->members())
    if (member.initial) direct::note_hold(member.process.pid(), member.process.pidfd());
  if (done) {
    // The driver has the GPU switched for it.
    const auto neighbours = HeldNeighbours::hold({*driver, interrupt, progress, log_warning},
                                                 tree->infos(), {}, kNeighbourTime);
    if (!neighbours) log_warning(neighbours.error().message);
    done = tree->checkpoint(progress, interrupt);
  }
  for (const TreeMember& member : tree->members()) {
    if (!done) return done;
    if (!member.initial || !member.process.alive()) continue;
    STASIS_TRY_ASSIGN(auto state, member.process.state());
    if (state == CudaState::kCheckpointed) continue;
    return fail(ErrorCode::kWrongState,
                fmt::format("process {} is {} after its checkpoint", member.process.pid().value,
                            cuda_state_name(state)),
                "see `dmesg` for messages of the NVIDIA driver");
  }
  return done;
}

Result<void> DumpSession::checkpoint_tree() {
  STASIS_TRY_ASSIGN(auto awake, wake_tree(*state_->driver, *root_, Acting::kDriver));
  if (awake.empty()) return {};
  const auto limit = timeout(bytes_on_gpus(*state_->driver, *root_));
  const auto result = std::make_shared<Result<void>>();
  const bool in_time = proc::run_beside(
      awake, [state = state_, result] { *result = state->checkpoint(); }, limit);
  auto asleep = put_to_sleep(awake);
  if (!in_time) {
    // The checkpoint is cancelled; the roll-back brings back the processes that answer.
    state_->interrupt.request(SIGALRM);
    return fail(no_answer(limit, *root_));
  }
  if (!*result) return std::move(*result);
  if (!asleep) return asleep;
  return record_image();
}

namespace {

// Of processes in this one's network namespace: a restore looks at no other.
std::vector<std::uint16_t> ports_of(const std::vector<proc::ProcessInfo>& processes) {
  const proc::ProcFs procfs;
  proc::TcpPorts ports(procfs);
  struct stat own {};
  std::set<std::uint16_t> all;
  if (::stat("/proc/self/ns/net", &own) != 0) return {};
  for (const proc::ProcessInfo& info : processes) {
    struct stat its {};
    if (::stat(fmt::format("/proc/{}/ns/net", info.pid.value).c_str(), &its) != 0 ||
        its.st_ino != own.st_ino)
      continue;
    const auto found = ports.of(info.pid);
    all.insert(found.begin(), found.end());
  }
  return {all.begin(), all.end()};
}

}  // namespace

// The image needs the plugin only if we have put something into the processes.
Result<void> DumpSession::record_image() {
  GpuRecord record;
  bool ours = false;
  int count = 0;
  const proc::ProcFs procfs;
  for (const TreeMember& member : state_->tree->members()) {
    if (!member.initial || !member.process.alive()) continue;
    const auto details = procfs.details(member.process.pid());
    if (!details) return fail(Error(details.error()));
    record.processes.push_back(
        {details->ns_pid, *member.initial, state_->tree->gpu_use_of(member.process.pid())});
    if (*member.initial == CudaState::kCheckpointed) continue;
    ours = true;
    ++count;
  }
  if (!ours) return {};
  record.tcp_ports = ports_of(state_->tree->infos());
  record.simulated = state_->driver->info().simulated;
  record.driver_version = state_->driver->info().driver_version;
  if (auto gpus = state_->driver->gpus()) record.gpus = std::move(*gpus);
  if (const auto directory = image_directory()) {
    STASIS_TRY(write_record(*directory, record));
  }
  if (!enter_inventory()) {
    return fail(ErrorCode::kIo, "CRIU could not note in the image that it needs this plugin",
                "see the lines before in CRIU's log");
  }
  log_info(fmt::format("checkpointed {} process(es), {} of GPU memory", count,
                       format_bytes(state_->tree->gpu_bytes())));
  return {};
}

Result<void> DumpSession::roll_back() {
  // Processes that CRIU could not hold answer by themselves.
  STASIS_TRY_ASSIGN(auto awake, wake_tree(*state_->driver, *root_, Acting::kDriverAndAgents));
  const auto result = std::make_shared<Result<void>>();
  const auto limit = timeout(bytes_in_host_memory(*root_));
  const bool in_time = proc::run_beside(
      awake, [state = state_, result] { *result = state->roll_back(); }, limit);
  auto asleep = put_to_sleep(awake);
  if (!in_time) {
    const std::scoped_lock guard(state_->mutex);
    state_->given_up = true;
    Error why = no_answer(limit, *root_);
    why.code = ErrorCode::kNotRolledBack;
    return fail(std::move(why));
  }
  if (!*result) return std::move(*result);
  return asleep;
}

// CRIU has written all its files. A connection that waits to be accepted, as an agent's that asks
// for memory just now, it restores only in this order.
void DumpSession::order_sockets() {
  const auto directory = image_directory();
  if (!directory) return;
  const UniqueFd own(::fcntl(*directory, F_DUPFD_CLOEXEC, 0));
  Result<void> done;
  if (own.valid())
    done = put_listeners_first(own);
  else
    done = fail(errno_error("cannot copy a descriptor", errno));
  if (!done) log_error("the image may not be restored", done.error());
}

void DumpSession::finish(bool failed) {
  if (!locked_ || !state_->has_cuda()) return;
  if (!failed) order_sockets();
  should_die_ = !failed && ends_tasks() == true;
  if (!should_die_) {
    auto done = roll_back();
    if (!done) {
      log_error("the processes are not all back", done.error());
    } else {
      log_info("the processes are as they were");
    }
    return;
  }
  // CRIU ends them now, unless the user's script (--action-script, post-dump) has failed, which
  // CRIU does not report: then it lets them go. A thread that asks the driver for something while
  // its GPU is away would end the program (docs/adr/0007), so none is to run before settle().
  for (const TreeMember& member : state_->tree->members()) {
    if (!member.initial || *member.initial == CudaState::kCheckpointed) continue;
    (void)member.process.pidfd().signal(SIGSTOP);
  }
}

void DumpSession::settle() {
  // They are dead, or about to stop.
  constexpr milliseconds kMoment{200};
  if (!should_die_) return;
  should_die_ = false;
  bool well = true;
  for (TreeMember& member : state_->tree->members()) {
    if (!member.initial || *member.initial == CudaState::kCheckpointed) continue;
    const auto start = std::chrono::steady_clock::now();
    while (member.process.alive() && std::chrono::steady_clock::now() - start < kMoment) {
      const auto now = proc::ProcFs().process(member.process.pid());
      if (now && now->state == 'T') break;
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (!member.process.alive()) continue;
    const auto limit = timeout(bytes_in_host_memory(member.process.pid()));
    auto done = bring_stopped_to(member.process, *member.initial, limit);
    // What is left of the call needs it for as long as criu lives.
    if (!done && done.error().code == ErrorCode::kNoAnswer) (void)new std::shared_ptr(state_);
    if (done || !member.process.alive()) {
      log_info(fmt::format("process {} was to end and lives: it is {} again",
                           member.process.pid().value, cuda_state_name(*member.initial)));
      continue;
    }
    well = false;
    log_error(fmt::format("process {} was to end and lives", member.process.pid().value),
              done.error());
  }
  state_->tree->dismiss();
  if (auto back = state_->unrestorable.take_back(); !back) {
    well = false;
    log_error("the processes were to end and live", back.error());
  }
  if (well && state_->journal) {
    state_->journal->finish();
    state_->journal.reset();
  }
}

}  // namespace stasis::plugin
