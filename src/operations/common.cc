#include "operations/common.h"

#include <algorithm>
#include <memory>
#include <set>
#include <thread>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "checkpoint/inherited_files.h"
#include "checkpoint/obstacles.h"
#include "checkpoint/ranks.h"
#include "checkpoint/suspend_record.h"
#include "checkpoint/swap_record.h"
#include "direct/agent_client.h"
#include "image/image_reader.h"
#include "operations/process_lock.h"

namespace stasis {

namespace {

// What a killed operation left behind is brought back to what it was before that one.
void inherit_states(Group& group, const std::vector<JournalTarget>& inherited) {
  for (GroupMember& member : group.members()) {
    if (!member.initial) continue;
    for (const JournalTarget& left : inherited) {
      if (left.pid != member.process.pid()) continue;
      if (left.start_ticks != 0 && left.start_ticks != member.process.info().start_ticks) continue;
      member.initial = left.initial;
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
  return {ErrorCode::kNotCuda,
          others == 0 ? fmt::format("process {} does not use CUDA", root)
                      : fmt::format("neither process {} nor any of the {} below it uses CUDA", root,
                                    others),
          "`stasis ps` lists the processes that use CUDA",
          {},
          {}};
}

Error failed_state(const Process& process) {
  return {ErrorCode::kFailedState,
          fmt::format("the driver has given up the CUDA state of process {} ({})",
                      process.pid().value, process.info().comm),
          "end it, and restore it from an image if there is one",
          {},
          {}};
}

// A roll-back that runs out of descriptors leaves its target suspended. Each process takes a pidfd,
// and some while it is asked; CRIU and its files come on top.
Result<void> check_descriptors(std::size_t processes) {
  constexpr std::uint64_t kSpare = 64;
  constexpr std::uint64_t kEach = 7;
  return allow_descriptors(kSpare + kEach * processes);
}

// The operation that was killed, if one of these is in its record.
std::optional<JournalRecord> left_behind(const std::vector<JournalTarget>& everybody) {
  const auto entries = read_journal();
  if (!entries) return std::nullopt;
  for (const JournalEntry& entry : *entries) {
    if (entry.under_way) continue;
    for (const JournalTarget& target : entry.record.targets) {
      const bool in_tree =
          std::any_of(everybody.begin(), everybody.end(), [&](const JournalTarget& one) {
            return one.pid == target.pid &&
                   (target.start_ticks == 0 || one.start_ticks == target.start_ticks);
          });
      if (in_tree) return entry.record;
    }
  }
  return std::nullopt;
}

}  // namespace

Result<OpenedGroup> open_group(const Environment& env, const std::string& operation, Pid root,
                               const std::string& image, bool without_cuda,
                               const ImageContent* content, std::span<const GpuMapEntry> gpu_map) {
  // No record is made for what is not there, or not CUDA.
  std::optional<Group> group;
  const auto look = [&]() -> Result<void> {
    auto opened = Group::open(env.driver, root);
    if (!opened) return fail(std::move(opened.error()));
    opened->dismiss();
    group.emplace(std::move(*opened));
    if (group->cuda_count() == 0 && !without_cuda) return fail(not_cuda(*group));
    for (const GroupMember& member : group->members()) {
      if (member.initial == CudaState::kFailed) return fail(failed_state(member.process));
    }
    return {};
  };
  const proc::ProcFs procfs;
  auto tree = procfs.tree(root);
  if (!tree) return fail(std::move(tree.error()));
  std::vector<JournalTarget> everybody;
  for (const proc::ProcessInfo& info : *tree)
    everybody.push_back({info.pid, info.start_ticks, CudaState::kRunning});
  if (auto enough = check_descriptors(everybody.size()); !enough) {
    return fail(std::move(enough.error()));
  }
  if (auto free = check_not_busy(everybody); !free) return fail(std::move(free.error()));
  // Before the driver is asked, which keeps its asker waiting while another tool's call goes on.
  std::vector<Pid> numbers;
  for (const JournalTarget& one : everybody)
    numbers.push_back(one.pid);
  auto locks = lock_processes(numbers);
  if (!locks) return fail(std::move(locks.error()));
  if (auto seen = look(); !seen) return fail(std::move(seen.error()));
  // Before there is a record of ours, which would replace the one that says where that image is.
  const auto left = left_behind(everybody);
  // A resume looks where that one did, and says so in its record.
  const bool goes_on = left && left->operation == "resume" && operation == "resume" &&
                       !image.empty() && left->image == image;
  if (left && !goes_on) {
    auto whole = check_content(*group,
                               fmt::format("`stasis recover {0}`; or, if the image is elsewhere "
                                           "now, `stasis resume {0} --images-dir DIR`",
                                           left->root.value),
                               content);
    if (!whole) return fail(std::move(whole.error()));
  }
  set_fault_target(root);
  JournalRecord intended{operation, root, Pid{}, image, {}};
  intended.gpu_map = gpu_map_text(gpu_map);
  auto begun = Journal::begin(std::move(intended));
  if (!begun) return fail(std::move(begun.error()));
  auto journal = std::make_unique<Journal>(std::move(*begun));
  if (journal->unwritten()) {
    env.tell(
        "the state directory has no room for a record of this: if it is killed, `stasis recover "
        "--all` knows nothing of it");
  }
  if (!journal->inherited().empty()) {
    auto ready = wait_for_criu(env, journal->left());
    if (ready) ready = settle(env, journal->inherited());
    if (ready) ready = look();
    if (!ready) {
      journal->finish();
      return fail(std::move(ready.error()));
    }
    if (journal->left().operation == "dump") {
      (void)clear_leftovers(journal->left().image, false,
                            [](const std::string& path) { return who_needs(path).has_value(); });
    }
  }
  // What we saw before the journal was ours may be what another operation, which has ended since,
  // was just doing. So look until what we have entered is what there is.
  for (bool same = false; !same;) {
    inherit_states(*group, journal->inherited());
    const auto entered = states_of(*group);
    auto done = journal->update(journal_targets(group->members()));
    if (done) done = look();
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
  OpenedGroup opened{std::move(*locks), std::move(journal), {}, std::move(*group)};
  opened.group.arm();
  Journal* record = opened.journal.get();
  opened.group.on_members_changed = [record](const std::vector<GroupMember>& members) {
    return record->update(journal_targets(members));
  };
  return opened;
}

namespace {

// Looks at those of the members that are not in `checked` yet.
Result<void> look_for_obstacles(const Environment& env, const std::vector<GroupMember>& members,
                                bool ignore, std::set<Pid>& checked) {
  std::vector<proc::ProcessInfo> fresh;
  for (const GroupMember& member : members) {
    if (member.initial != CudaState::kRunning && member.initial != CudaState::kLocked) continue;
    if (checked.insert(member.process.pid()).second) fresh.push_back(member.process.info());
  }
  auto found = find_obstacles(env.driver, proc::ProcFs(), fresh);
  if (!found) return fail(std::move(found.error()));
  if (found->empty()) return {};
  Error why = describe_obstacles(*found, fresh);
  if (ignore) {
    env.tell("going on as told, in spite of " + why.message);
    return {};
  }
  why.remedy += "; if you know better: --ignore-obstacles";
  return fail(std::move(why));
}

// The threads of a process that somebody traces cannot be kept still.
Result<void> refuse_tracers(const std::vector<GroupMember>& members) {
  const proc::ProcFs procfs;
  for (const GroupMember& member : members) {
    if (!member.initial || *member.initial == CudaState::kCheckpointed) continue;
    const Pid pid = member.process.pid();
    const auto tracer = procfs.tracer(pid);
    if (!tracer) continue;
    return fail(ErrorCode::kBusy,
                fmt::format("process {} ({}) is being traced by process {} (CRIU, or a debugger)",
                            pid.value, member.process.info().comm, *tracer),
                "wait for it to end, or detach it");
  }
  return {};
}

// What agents know of the sharing of their programs' memory, whoever is to move it.
Result<void> refuse_open_elsewhere(const Environment& env, const std::vector<GroupMember>& members,
                                   bool ignore) {
  std::vector<std::pair<Pid, std::uint32_t>> pieces;
  for (const GroupMember& member : members) {
    if (member.initial != CudaState::kRunning) continue;
    auto agent = find_agent(env, member.process, true);
    if (!agent && is_held_up(agent.error())) return fail(std::move(agent.error()));
    if (!agent || !*agent) continue;  // whoever needs it says what is wrong with it
    if (!(*agent)->ask(direct::AgentCommand::kNone, 0, std::chrono::milliseconds(5000))) continue;
    pieces.emplace_back(member.process.pid(), (*agent)->shared_count());
    // Its peer was killed, and it is about to make the program run by itself. Done now, so that the
    // driver does not come in between; what cannot be done now it goes on trying.
    const auto state = (*agent)->state();
    const bool undoes = state != direct::AgentState::kRunning && state != direct::AgentState::kHeld;
    if (undoes && !(*agent)->content_is_elsewhere()) (void)(*agent)->bring_back();
  }
  return refuse_shared(env, pieces, ignore);
}

}  // namespace

Result<void> refuse_obstacles(const Environment& env, OpenedGroup& opened, bool ignore) {
  auto checked = std::make_shared<std::set<Pid>>();
  auto clear = refuse_tracers(opened.group.members());
  if (clear) clear = look_for_obstacles(env, opened.group.members(), ignore, *checked);
  if (clear) clear = refuse_open_elsewhere(env, opened.group.members(), ignore);
  if (!clear && opened.journal->inherited().empty()) {
    opened.group.dismiss();  // nobody has been touched
    opened.journal->finish();
    return clear;
  }
  // By a killed operation somebody has.
  if (!clear) return fail(roll_back(env, opened, std::move(clear.error())));
  opened.group.on_members_changed = [&env, ignore, checked,
                                     update = opened.group.on_members_changed](
                                        const std::vector<GroupMember>& members) -> Result<void> {
    auto fine = look_for_obstacles(env, members, ignore, *checked);
    return fine ? update(members) : fine;
  };
  return {};
}

Result<void> check_content(const Group& group, const std::string& remedy,
                           const ImageContent* known) {
  for (const GroupMember& member : group.members()) {
    if (!member.initial || !member.process.alive()) continue;
    auto agent = direct::AgentClient::look(member.process.pid());
    if (!agent) return fail(std::move(agent.error()));
    if (!*agent || (*agent)->content_id == direct::ContentId{}) continue;
    if (known != nullptr && (*agent)->content_id == known->id()) continue;
    const auto memory = recall_suspended(member.process);
    const std::string where = memory && !memory->image.empty() ? memory->image : "an image";
    return fail(ErrorCode::kBusy,
                fmt::format("the content of process {}'s GPU memory is in {} and nowhere else",
                            member.process.pid().value, where),
                "bring it back first: " + remedy);
  }
  return {};
}

void decide_swaps(const Group& group) {
  for (const GroupMember& member : group.members())
    if (member.process.pid() == group.root())
      forget_swaps_of(group.root(), member.process.info().start_ticks);
}

Result<void> note_criu(Journal& journal, Pid criu) {
  auto info = proc::ProcFs().process(criu);
  if (!info) return fail(std::move(info.error()));
  return journal.note_criu({criu, info->start_ticks});
}

Result<void> wait_for_criu(const Environment& env, const JournalRecord& record) {
  constexpr std::chrono::seconds kPatience{60};
  constexpr std::chrono::milliseconds kPoll{10};
  if (!record.criu) return {};
  const proc::ProcFs procfs;
  const auto start = Clock::now();
  for (Waiting waiting(env.progress);; waiting.tell()) {
    auto info = procfs.process(record.criu->pid);
    const bool lives = info && info->start_ticks == record.criu->start_ticks &&
                       info->state != 'Z' && info->state != 'X';
    if (!lives) return {};
    if (auto stop = env.interrupt.check(); !stop) return stop;
    if (Clock::now() - start > kPatience) break;
    std::this_thread::sleep_for(kPoll);
  }
  return fail(
      ErrorCode::kBusy,
      fmt::format("the criu of `{}` (process {}) still works on process {}",
                  operation_name(record.operation), record.criu->pid.value, record.root.value),
      fmt::format("wait for it to end, or end it with `kill {}`; then recover again",
                  record.criu->pid.value));
}

Result<void> settle(const Environment& env, std::span<const JournalTarget> targets) {
  constexpr std::chrono::milliseconds kPoll{25};
  constexpr std::chrono::milliseconds kQuiet{500};
  constexpr std::chrono::seconds kLimit{60};
  // The driver moves gigabytes per second; what a program's own threads do is no sign of it.
  constexpr std::uint64_t kMoved = 1 << 20;
  struct Seen {
    std::optional<CudaState> state;
    std::uint64_t resident = 0;
  };
  const proc::ProcFs procfs;
  std::vector<Process> processes;
  for (const JournalTarget& target : targets) {
    auto process = Process::open(env.driver, target.pid);
    if (process && (target.start_ticks == 0 || target.start_ticks == process->info().start_ticks)) {
      processes.push_back(std::move(*process));
    }
  }
  std::vector<Seen> last(processes.size());
  const auto start = Clock::now();
  auto changed = start;
  Waiting waiting(env.progress);
  while (!processes.empty() && Clock::now() - changed < kQuiet && Clock::now() - start < kLimit) {
    if (auto stop = env.interrupt.check(); !stop) return stop;
    for (std::size_t i = 0; i < processes.size(); ++i) {
      Seen now;
      if (auto state = processes[i].cuda_state()) now.state = *state;
      if (auto bytes = procfs.resident_bytes(processes[i].pid())) now.resident = *bytes;
      const std::uint64_t moved = now.resident > last[i].resident ? now.resident - last[i].resident
                                                                  : last[i].resident - now.resident;
      // The driver moves nothing of a process that it lets run: what changes then is the program's
      // own doing, and one that allocates all the time would never be quiet.
      const bool moves = moved > kMoved && now.state != CudaState::kRunning;
      if (now.state != last[i].state || moves) changed = Clock::now();
      last[i] = now;
    }
    waiting.tell();
    std::this_thread::sleep_for(kPoll);
  }
  return {};
}

namespace {

Result<void> bring_to_rest(const Environment& env, OpenedGroup& opened,
                           const QuiesceOptions& options, Phases& phases) {
  Group& group = opened.group;
  if (options.for_dump) group.drop_zeros();
  if (auto moved = opened.direct.move_out(env, group, options, phases); !moved) return moved;
  for (;;) {
    phases.begin("lock");
    const bool runs = std::any_of(
        group.members().begin(), group.members().end(),
        [](const GroupMember& member) { return member.initial == CudaState::kRunning; });
    if (runs && !phases.standing()) phases.stands_still();
    auto done = group.lock(options.timeout, env.interrupt);
    if (!done) return done;
    if (options.path != MemoryPath::kDriver) opened.direct.tell_of_new(env, group);
    if (options.at_rest) options.at_rest();
    // Once more: the lock may have taken seconds, in which the ranks of a job have met.
    std::set<Pid> nobody;
    if (!options.ignore_obstacles) done = look_for_obstacles(env, group.members(), false, nobody);
    if (!done) return done;
    phases.begin("checkpoint");
    done = group.keep_still();
    if (!done) return done;
    // Whom they have forked until then; from now on they fork nobody.
    auto more = group.look_again();
    if (!more) return fail(std::move(more.error()));
    if (*more) continue;
    if (done = opened.direct.expect_agents(); !done) return done;
    auto inherited =
        find_inherited_files(proc::ProcFs(), group.members(), env.driver.info().simulated,
                             !options.for_dump || options.ignore_obstacles);
    if (!inherited) return fail(std::move(inherited.error()));
    done = replace_inherited_files(*inherited, opened.journal.get());
    if (!done && options.for_dump) return done;
    if (!done) env.tell("a later dump may be refused: " + done.error().to_string());
    for (const GroupMember& member : group.members())
      if (member.initial) direct::AgentClient::note_hold(member.process.pid());
    done = group.checkpoint(env.progress, env.interrupt);
    if (!done) return done;
    // A checkpoint takes seconds, in which a process without CUDA can start one that has.
    more = group.look_again();
    if (!more) return fail(std::move(more.error()));
    if (!*more) return opened.direct.finish_out(phases);
  }
}

}  // namespace

Result<void> quiesce(const Environment& env, OpenedGroup& opened, const QuiesceOptions& options,
                     Phases& phases) {
  auto done = bring_to_rest(env, opened, options, phases);
  if (done || done.error().code != ErrorCode::kTimeout) return done;
  const auto others = find_other_ranks(proc::ProcFs(), opened.group.root());
  if (!others) return done;
  Error error = std::move(done.error());
  error.remedy = fmt::format("{}; {}", describe_other_ranks(*others), error.remedy);
  return fail(std::move(error));
}

Error roll_back(const Environment& env, OpenedGroup& opened, Error why) {
  opened.direct.wait_for_copy();
  return rolled_back(env, opened, std::move(why), opened.group.roll_back());
}

Error rolled_back(const Environment& env, OpenedGroup& opened, Error why, Result<void> back) {
  // Where the driver still holds somebody, its agent waits for `stasis recover`: asked now, it
  // would hang in the driver.
  if (back) {
    opened.direct.take_held(env, opened.group);
    back = opened.direct.roll_back();
    // Which is why the rest went wrong.
    if (auto gone = opened.direct.take_gone()) why = std::move(*gone);
  } else {
    opened.direct.dismiss();
  }
  // An agent has not brought its program back, and says no more what it does.
  if (back && why.code == ErrorCode::kNotRolledBack) return why;
  if (back) {
    opened.journal->finish();
    // A criu that was killed while its code ran in a process takes that along, in an instant.
    if (why.code == ErrorCode::kCriuFailed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::string ended;
    for (const GroupMember& member : opened.group.members()) {
      // Workers and helpers come and go.
      if (!member.initial && member.process.pid() != opened.group.root()) continue;
      if (!member.process.pidfd().wait_exit(0)) continue;
      ended += fmt::format("{}{} ({})", ended.empty() ? "" : ", ", member.process.pid().value,
                           member.process.info().comm);
    }
    // One that has become another program by exec lives, and is not as it was.
    const std::string rest = why.code == ErrorCode::kProcessGone
                                 ? "rolled back: all else is as it was"
                                 : "rolled back: every process is as it was";
    return std::move(why).within(
        ended.empty() ? rest : "rolled back, but ended meanwhile: process " + ended);
  }
  Error both = std::move(back.error());
  both.message = fmt::format("{}; and then {}", why.message, both.message);
  if (!why.remedy.empty()) both.remedy += "; the first failure: " + why.remedy;
  both.driver = why.driver;
  return both;
}

Error stands_still(Error why, Pid root, bool tries_by_itself) {
  if (tries_by_itself && why.code == ErrorCode::kOutOfGpuMemory) {
    return std::move(why).within(
        "the program waits for its GPU memory, and goes on by itself as soon as there is room for "
        "it");
  }
  if (why.code == ErrorCode::kProcessGone) return why;
  const bool damaged = why.code == ErrorCode::kImageCorrupt;
  why.code = ErrorCode::kNotRolledBack;
  if (damaged) {
    // Nothing of ours brings that back.
    why.remedy = fmt::format(
        "end the program with `kill -9 {0}` and restore from another image; or put the damaged "
        "files back in their place, whole: the program stands still until `stasis recover {0}` "
        "then",
        root.value);
    return std::move(why).within("while its GPU memory was brought back");
  }
  why.remedy += fmt::format("{}the program stands still until `stasis recover {}`",
                            why.remedy.empty() ? "" : "; ", root.value);
  return std::move(why).within("while its GPU memory was brought back");
}

ProcessReport report_process(const Process& process, bool cuda, std::uint64_t gpu_bytes) {
  ProcessReport report{process.pid(), process.info().comm, cuda, std::nullopt, gpu_bytes};
  if (cuda && process.alive()) {
    if (auto state = process.cuda_state()) report.state = *state;
  }
  return report;
}

std::vector<ProcessReport> report_processes(const Group& group) {
  std::vector<ProcessReport> out;
  for (const GroupMember& member : group.members()) {
    std::uint64_t bytes = 0;
    if (auto use = group.gpu_use().find(member.process.pid()); use != group.gpu_use().end()) {
      for (const GpuUse& part : use->second)
        bytes += part.bytes;
    }
    out.push_back(report_process(member.process, member.initial.has_value(), bytes));
  }
  return out;
}

Result<void> verify_states(const Group& group, CudaState wanted) {
  for (const GroupMember& member : group.members()) {
    if (!member.initial || !member.process.alive()) continue;
    auto state = member.process.cuda_state();
    if (!state) {
      if (state.error().code == ErrorCode::kProcessGone) continue;
      return fail(std::move(state.error()));
    }
    if (!*state || **state == wanted) continue;
    return fail(ErrorCode::kWrongState,
                fmt::format("process {} is {} and should be {}", member.process.pid().value,
                            cuda_state_name(**state), cuda_state_name(wanted)),
                "another tool acts on it; wait for it to end");
  }
  return {};
}

}  // namespace stasis
