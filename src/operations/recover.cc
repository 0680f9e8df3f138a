#include <algorithm>
#include <csignal>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/gpu_reservation.h"
#include "checkpoint/stopped_process.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_probe.h"
#include "direct/neighbours.h"
#include "image/image_reader.h"
#include "operations/host_memory.h"
#include "operations/leftovers.h"
#include "operations/part_links.h"
#include "operations/restore_log.h"
#include "operations/rollback.h"
#include "proc/parking.h"

namespace stasis {

namespace {

struct Recovered {
  Process process;
  CudaState initial{};
};

// Brings one target of a record back to its state for the driver. Nothing if the process has ended
// meanwhile.
Result<std::optional<Recovered>> recover_target(const Environment& env, const JournalTarget& target,
                                                const JournalRecord& record) {
  const bool stopped_by_us = record.operation == Operation::kCriuDump;
  Driver& driver = env.driver;
  auto process = Process::open(driver, target.pid);
  if (!process) {
    const ErrorCode code = process.error().code;
    if (code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie ||
        code == ErrorCode::kThreadId) {
      return std::optional<Recovered>();
    }
    return fail(std::move(process.error()));
  }
  if (!may_be_same(target, process->id())) return std::optional<Recovered>();
  // CRIU outlives a killed `stasis dump` until it sees that its tool does not answer any more.
  const auto details = proc::ProcFs().details(target.pid);
  if (details && details->tracer != 0) {
    return fail(ErrorCode::kBusy,
                fmt::format("process {} is being traced by process {} (CRIU, or a debugger)",
                            target.pid.value, details->tracer),
                "wait for it to end, then recover again");
  }
  // If a stop signal holds it, it was the operation's.
  if (stopped_by_us && process->info().state == 'T') {
    auto done = bring_stopped_to(*process, target.initial);
    if (!done && !process->alive()) return std::optional<Recovered>();
    STASIS_TRY(std::move(done));
    return std::optional<Recovered>({std::move(*process), target.initial});
  }
  STASIS_TRY_ASSIGN(auto state, process->cuda_state());
  // A record of a restore has no start times yet: a number that another program got has no CUDA
  // state, or one that no tool froze.
  if (!state) return std::optional<Recovered>();
  auto done = finish_stillness(env, *process);
  if (done && *state == CudaState::kCheckpointed && target.initial != CudaState::kCheckpointed) {
    done = restore_state(env, *process);
    // Another was quicker, such as a call that a killed tool has left: bring_to() does the rest.
    if (!done && done.error().code == ErrorCode::kWrongState) done = {};
  }
  if (done) done = process->bring_to(target.initial, std::chrono::seconds(30));
  // CRIU ends what it was restoring when it sees that its tool does not answer any more.
  if (!done && !process->alive()) return std::optional<Recovered>();
  STASIS_TRY(std::move(done));
  return std::optional<Recovered>({std::move(*process), target.initial});
}

// The GPU memory of these processes, which the driver lets run.
Result<void> bring_memory_back(const Environment& env, const JournalRecord& record,
                               const std::vector<const Process*>& processes) {
  Phases phases;
  GpuMemory direct;
  for (const Process* process : processes) {
    const auto memory = recall_suspended(*process);
    for (const std::string& image : {record.image, memory ? memory->image : std::string()})
      for (auto& content : find_content(image))
        direct.add_image(std::move(content));
  }
  auto moved = direct.move_in(env.for_any_amount(), processes, phases);
  if (!moved) {
    const ErrorCode code = moved.error().code;
    if (code == ErrorCode::kWrongState) return fail(std::move(moved.error()));
    const Pid root = code == ErrorCode::kImageCorrupt ? processes.front()->pid() : record.root;
    return fail(stands_still(std::move(moved.error()), root, try_by_themselves(processes)));
  }
  for (const Process* process : processes)
    forget_suspended(*process);
  return {};
}

// Those that have given up each other's memory take it again together, before any of them runs;
// all others one after the other, so that one that cannot be brought back keeps none.
std::vector<std::vector<const Process*>> by_memory(const std::vector<Recovered>& recovered) {
  std::vector<const Process*> together;
  std::vector<std::vector<const Process*>> groups;
  for (const Recovered& one : recovered) {
    if (one.initial != CudaState::kRunning) continue;
    const auto agent = direct::probe_agent(one.process.pid());
    const bool shares = agent && *agent && (*agent)->shares;
    shares ? together.push_back(&one.process) : groups.push_back({&one.process});
  }
  if (!together.empty()) groups.insert(groups.begin(), std::move(together));
  return groups;
}

// Waits until no tracer has stopped the target, such as a criu that dies at this moment.
Result<void> wait_for_tracer(const Environment& env, const JournalTarget& target) {
  constexpr std::chrono::seconds kTimeout{10};
  constexpr std::chrono::milliseconds kPoll{10};
  const auto start = Clock::now();
  for (Waiting waiting(env.progress);; waiting.tell()) {
    const auto details = proc::ProcFs().details(target.pid);
    if (!details || details->tracer == 0) return {};
    STASIS_TRY(env.interrupt.check());
    if (Clock::now() - start > kTimeout) return {};  // recover_target() says who it is
    std::this_thread::sleep_for(kPoll);
  }
}

// Whether it can be an image of what was to be ended.
bool has_all(const Manifest& manifest, const JournalRecord& record) {
  const auto is_there = [&](const ProcessId& process) {
    return std::any_of(manifest.processes.begin(), manifest.processes.end(),
                       [&](const ProcessRecord& one) { return one.pid == process.pid; });
  };
  return manifest.root == record.root &&
         std::all_of(record.ending.begin(), record.ending.end(), is_there);
}

// A dump had its image complete and CRIU the word to end the tree. If that has begun, what is left
// of the tree is half a job, and all of it is in the image. True if the tree has ended now. If all
// of it lives, nothing was begun: CRIU has let it go when it missed our answer.
Result<bool> finish_ending(const JournalRecord& record) {
  constexpr int kKillWaitMs = 10000;
  const bool all = std::all_of(record.ending.begin(), record.ending.end(),
                               [](const auto& p) { return is_alive(p); });
  if (record.ending.empty() || all) return false;
  // A user may have moved it, put another in its place, or worse; then what lives is all there
  // is.
  const auto image = ImageReader::open(record.image);
  if (!image || !has_all(image->manifest(), record)) return false;
  std::vector<std::pair<Pid, Pidfd>> held;
  for (const ProcessId& process : record.ending) {
    auto pidfd = Pidfd::open(process.pid);
    if (pidfd && is_alive(process)) held.emplace_back(process.pid, std::move(*pidfd));
  }
  for (const auto& [pid, pidfd] : held)
    (void)pidfd.signal(SIGKILL);
  for (const auto& [pid, pidfd] : held) {
    if (pidfd.wait_exit(kKillWaitMs)) continue;
    return fail(ErrorCode::kNotRolledBack,
                fmt::format("process {} does not end, and its image {} is complete", pid.value,
                            record.image),
                fmt::format("end it with `kill -9 {}`", pid.value));
  }
  return true;
}

// Brings the targets of a record back, and fills in the report.
Result<void> recover_targets(const Environment& env, const JournalRecord& record,
                             RecoverReport& report) {
  Result<void> worst;
  std::vector<Recovered> recovered;
  for (const JournalTarget& target : record.targets) {
    STASIS_TRY(env.interrupt.check());
    STASIS_TRY(fault(FaultPoint::kRecoverTarget));
    STASIS_TRY(wait_for_tracer(env, target));
    auto one = recover_target(env, target, record);
    // One that cannot be brought back is no reason to leave the others.
    if (!one)
      worst = fail(std::move(one.error()));
    else if (*one)
      recovered.push_back(std::move(**one));
    STASIS_TRY(fault(FaultPoint::kRecoverTargetDone));
  }
  std::set<Pid> failed;
  for (const auto& group : by_memory(recovered)) {
    STASIS_TRY(env.interrupt.check());
    auto done = bring_memory_back(env, record, group);
    if (done) continue;
    worst = std::move(done);
    for (const Process* process : group)
      failed.insert(process->pid());
  }
  for (const Recovered& one : recovered)
    if (!failed.contains(one.process.pid()))
      report.processes.push_back(report_process(one.process, true, 0));
  return worst;
}

// The half of an image that a killed dump has left.
Result<void> clear_image(const Environment& env, const JournalRecord& record,
                         RecoverReport& report) {
  if (!writes_image(record.operation) || record.image.empty()) return {};
  STASIS_TRY(fault(FaultPoint::kRecoverImage));
  STASIS_TRY(clear_or_tell(env, record.image, report.processes.empty()));
  report.image_kept = !report.processes.empty() && ImageReader::open(record.image).has_value();
  return fault(FaultPoint::kRecoverImageDone);
}

// Processes without CUDA of which a thread may be where a killed operation made it replace the
// files that it had inherited. Those that have gone are no failure.
Result<void> let_others_go(const JournalRecord& record) {
  Result<void> worst;
  for (const ProcessId& process : record.remote_calls) {
    if (!is_alive(process)) continue;
    auto done = finish_remote_call(process.pid);
    if (!done && is_alive(process)) worst = std::move(done);
  }
  return worst;
}

// A part of a job of several nodes may have its connections locked.
void unlock_connections(const JournalRecord& record) {
  if (record.operation != Operation::kDump && record.operation != Operation::kRestore) return;
  std::vector<Pid> processes;
  for (const proc::ProcessInfo& info :
       proc::ProcFs().tree(record.root).value_or(std::vector<proc::ProcessInfo>()))
    processes.push_back(info.pid);
  (void)let_links_go(processes);
}

Result<void> recover_adopted(const Environment& env, Journal& journal, RecoverReport& report) {
  // A copy: the journal goes on to change its own.
  const JournalRecord record = journal.record();
  STASIS_TRY(fault(FaultPoint::kRecoverAdopted));
  // An operation on another root may have one of them by now.
  STASIS_TRY(journal.update(record.targets));
  STASIS_TRY(wait_for_criu(env, record));
  STASIS_TRY(fault(FaultPoint::kRecoverAlone));
  STASIS_TRY_ASSIGN(auto ended, finish_ending(record));
  report.finished = ended;
  if (!ended) put_terminals_right(env, record);
  STASIS_TRY(settle(env, record.targets));
  GpuReservation room;
  STASIS_TRY(room.come_back(env.interrupt));
  STASIS_TRY(fault(FaultPoint::kRecoverSettled));
  unlock_connections(record);
  auto others = let_others_go(record);
  STASIS_TRY(refuse_recovery_beside_ranks(env, record));
  STASIS_TRY(recover_targets(env, record, report));
  STASIS_TRY(std::move(others));
  return clear_image(env, record, report);
}

// A word about what a killed resume has left suspended: its user waits for it.
void add_stands_still(RecoverReport& report) {
  std::string suspended;
  for (const ProcessReport& process : report.processes) {
    if (process.state != CudaState::kCheckpointed) continue;
    suspended += fmt::format("{}{}", suspended.empty() ? "" : ", ", process.pid.value);
  }
  if (report.error || suspended.empty()) return;
  report.as_before = true;
  report.error = Error{ErrorCode::kWrongState,
                       fmt::format("the resume of process {} was cut short and is taken back: "
                                   "suspended as before: process {}",
                                   report.root.value, suspended),
                       fmt::format("`stasis resume {}`", suspended)};
}

// Nothing if another tool has recovered it meanwhile.
std::optional<RecoverReport> recover_record(const Environment& env, const JournalEntry& seen) {
  RecoverReport report;
  report.root = seen.record.root;
  report.operation = seen.record.operation;
  report.image = seen.record.image;
  set_fault_target(seen.record.root);
  auto journal = Journal::adopt(seen.record.root);
  if (!journal) {
    report.error = std::move(journal.error());
    return report;
  }
  if (!*journal) return std::nullopt;
  if (auto done = recover_adopted(env, **journal, report); !done) {
    report.error = std::move(done.error());
    return report;
  }
  (*journal)->finish();
  return report;
}

bool is_no_program(const Error& error) {
  const ErrorCode code = error.code;
  return code == ErrorCode::kNoSuchProcess || code == ErrorCode::kZombie ||
         code == ErrorCode::kThreadId || code == ErrorCode::kNotCuda;
}

// Its record, unless it is under way.
std::optional<JournalEntry> find_left(Pid root) {
  const auto entries = read_journal();
  if (!entries) return std::nullopt;
  for (const JournalEntry& entry : *entries)
    if (entry.record.root == root && !entry.under_way) return entry;
  return std::nullopt;
}

// A resume that was killed is done again, over its record: there was nothing to go back to but
// programs that stand still.
std::optional<RecoverReport> finish_resume(const Environment& env, const JournalEntry& seen) {
  const JournalRecord& record = seen.record;
  RecoverReport report;
  report.root = record.root;
  report.operation = record.operation;
  report.image = record.image;
  ResumeOptions options;
  options.images_dir = record.image;
  if (!record.gpu_map.empty()) {
    if (auto map = parse_gpu_map(record.gpu_map)) options.gpu_map = std::move(*map);
  }
  auto resumed = resume(env.for_any_amount(), record.root, options);
  // Its content is not where it was: what there is without it, and the reason.
  if (!resumed && resumed.error().code == ErrorCode::kBusy) return recover_record(env, seen);
  // What is in the record and not in the tree any more is brought back by itself.
  const auto left = find_left(record.root);
  if (resumed || is_no_program(resumed.error())) {
    if (resumed) report.processes = std::move(resumed->processes);
    if (!left) return resumed ? std::optional<RecoverReport>(std::move(report)) : std::nullopt;
    auto others = recover_record(env, *left);
    if (!others) return report;
    report.processes.insert(report.processes.end(), others->processes.begin(),
                            others->processes.end());
    report.error = std::move(others->error);
    add_stands_still(report);
    return report;
  }
  report.error = std::move(resumed.error());
  report.as_before = !left;
  return report;
}

// As recover_record(), but that a resume is finished.
std::optional<RecoverReport> recover_entry(const Environment& env, const JournalEntry& seen) {
  return seen.record.operation == Operation::kResume ? finish_resume(env, seen)
                                                     : recover_record(env, seen);
}

// Killed, and not gone yet, which may take a while on a machine with much to do.
bool is_ending(const ProcessId& id) {
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING of linux/sched.h
  const proc::ProcFs procfs;
  const auto info = procfs.process(id.pid);
  if (!info || info->has_ended() || (info->flags & kExiting) != 0) return true;
  if (!may_be_same(info->id(), id)) return true;
  const auto threads = procfs.threads(id.pid);
  return std::any_of(threads.begin(), threads.end(), [&](Tid thread) {
    const auto status = procfs.thread_status(id.pid, thread);
    return status && (status->pending >> (SIGKILL - 1) & 1) != 0;
  });
}

// Whose stasis was just killed is no more under way than if it had been gone by now. `of`: whose it
// is, or 0 for any process.
Result<std::vector<JournalEntry>> read_settled_journal(const Environment& env, Pid of) {
  constexpr std::chrono::seconds kTimeout{5};
  constexpr std::chrono::milliseconds kPoll{10};
  const auto deadline = Clock::now() + kTimeout;
  for (Waiting waiting(env.progress);; waiting.tell()) {
    auto entries = read_journal();
    if (!entries || Clock::now() > deadline || !env.interrupt.check() ||
        std::none_of(entries->begin(), entries->end(), [of](const JournalEntry& entry) {
          return (of.value == 0 || entry.record.root == of) && entry.under_way &&
                 is_ending(entry.record.owner);
        }))
      return entries;
    std::this_thread::sleep_for(kPoll);
  }
}

// What was cut short in a container is in the records of its PID namespace, by its numbers there.
Error with_other_records(Error error, Pid root) {
  const proc::ProcFs procfs;
  const auto its = proc::pid_namespace_of(root);
  const auto info = procfs.details(root);
  if (!info || its == 0 || its == proc::pid_namespace_of(Pid{static_cast<int>(::getpid())}))
    return error;
  error.remedy = fmt::format(
      "it is process {} of another PID namespace: if the operation was begun there, run `stasis "
      "recover {}` in that container{}{}",
      info->ns_pid, info->ns_pid, error.remedy.empty() ? "" : "; otherwise ", error.remedy);
  return error;
}

// Not of one target, and in no operation's way.
void sweep() {
  sweep_journal();
  RestoreLog::sweep();
  forget_the_dead();
}

// The operation to finish, which may have been one on a larger tree.
Pid root_of_operation(const std::vector<JournalEntry>& entries, Pid pid) {
  const auto has_record = [pid](const JournalEntry& entry) { return entry.record.root == pid; };
  if (std::any_of(entries.begin(), entries.end(), has_record)) return pid;
  const auto info = proc::ProcFs().process(pid);
  return info ? left_behind_with(entries, info->id()).value_or(pid) : pid;
}

}  // namespace

Result<RecoverReport> recover(const Environment& env, Pid pid) {
  STASIS_TRY_ASSIGN(auto entries, read_settled_journal(env, pid));
  const Pid root = root_of_operation(entries, pid);
  RecoverReport out;
  out.root = root;
  for (const JournalEntry& entry : entries) {
    if (entry.record.root != root) continue;
    if (entry.under_way) return fail(busy(entry.record, root));
    // What was cut short comes first: it knows processes that are not in the tree any more, and
    // that CRIU may still hold one.
    if (auto report = recover_entry(env, entry)) out = std::move(*report);
    if (out.error) return fail(std::move(*out.error));
  }
  // Without a record too: a thread that was left so spins, and no state tells it.
  if (auto tree = proc::ProcFs().tree(root)) {
    for (const proc::ProcessInfo& info : *tree)
      (void)finish_remote_call(info.pid);
  }
  sweep();
  // Then everything in the tree that is not running, whatever left it so.
  auto report = resume(env.for_any_amount(), root, {});
  if (!report) {
    // With a record, a target that has ended meanwhile is an answer and no failure.
    if (is_no_program(report.error()) && out.operation != Operation::kNone) return out;
    return fail(with_other_records(std::move(report.error()), root));
  }
  for (const ProcessReport& before : out.processes) {
    const bool in_tree =
        std::any_of(report->processes.begin(), report->processes.end(),
                    [&](const ProcessReport& now) { return now.pid == before.pid; });
    if (!in_tree) report->processes.push_back(before);
  }
  out.processes = std::move(report->processes);
  out.was_so = report->was_so && out.operation == Operation::kNone;
  return out;
}

Result<std::vector<RecoverReport>> recover_all(const Environment& env) {
  STASIS_TRY_ASSIGN(auto entries, read_settled_journal(env, Pid{}));
  std::vector<RecoverReport> out;
  for (const JournalEntry& entry : entries) {
    if (entry.under_way) continue;
    if (auto report = recover_entry(env, entry)) out.push_back(std::move(*report));
  }
  sweep();
  return out;
}

Result<std::optional<RecoverReport>> undo_cut_short(const Environment& env, Pid root) {
  STASIS_TRY_ASSIGN(auto entries, read_settled_journal(env, root));
  for (const JournalEntry& entry : entries) {
    if (entry.record.root != root) continue;
    if (entry.under_way) return fail(busy(entry.record, root));
    auto report = recover_record(env, entry);
    if (report && report->error) return fail(std::move(*report->error));
    return report;
  }
  return std::optional<RecoverReport>();
}

bool wait_for_killed(const Interrupt& interrupt, const ProcessId& owner) {
  constexpr std::chrono::seconds kTimeout{5};
  constexpr std::chrono::milliseconds kPoll{10};
  const auto deadline = Clock::now() + kTimeout;
  while (true) {
    if (!is_alive(owner)) return true;
    if (!is_ending(owner) || Clock::now() > deadline || !interrupt.check()) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

}  // namespace stasis
