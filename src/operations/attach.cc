// `stasis attach`: the agent comes to programs that run. Long because its steps share the agents,
// and what each leaves behind after an error is told together.
#include <algorithm>
#include <array>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "abi/attach_state.h"
#include "attach/agent_hooks.h"
#include "base/fault_point.h"
#include "base/units.h"
#include "direct/agent_lookup.h"
#include "direct/agent_set.h"
#include "direct/gate_rank.h"
#include "operations/exchange.h"
#include "operations/open.h"
#include "operations/operations.h"
#include "operations/quiesce.h"
#include "operations/refusals.h"
#include "operations/rollback.h"
#include "proc/address_space.h"
#include "proc/cgroup.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

using attach::AttachState;
using direct::AgentClient;
using direct::AgentCommand;
using direct::AgentOrigin;
using direct::AgentState;
using std::chrono::milliseconds;

// An agent's thread begins to listen when it gets a processor.
constexpr milliseconds kBegins{10000};
// What a --timeout of 0 asks for, within what a clock counts.
constexpr milliseconds kForEver = std::chrono::hours(24 * 365);
// How long an agent that has not answered gets to open its gate: it may have been about to answer.
constexpr milliseconds kAfterSilence{500};
// How long a program is watched for which the user has given no word: what is seen is told.
constexpr milliseconds kWatchWithoutWord{500};
// A process that was killed may take as long to end.
constexpr int kEndingMs = 100;

constexpr std::array<const char*, attach::kLeftKinds> kLeftNames{
    "small", "shared-area", "other", "no-room", "address", "failed"};

const char* const kLeaveIt = "leave its memory to the driver, or start it with `stasis run`";
const char* const kGraphsRemedy =
    "a graph that was made before its memory is the agent's would end with error 719 at its next "
    "launch, if it has a copy from or to the host; if the program has none such: --graphs-are-safe";
const char* const kWordRemedy =
    "give your word with one of these: --graphs-are-safe if the program uses no CUDA graphs, or "
    "none "
    "with a copy from or to the host; --watch-graphs 30s, begun while it works: a time in which it "
    "would launch each of its graphs, after which it is attached to if it has launched none";

// What network cards were told of a program's GPU memory, they find at its addresses no more.
Result<void> refuse_rdma(const Process& process) {
  std::error_code failed;
  const std::string directory = fmt::format("/proc/{}/fd", process.pid().value);
  for (std::filesystem::directory_iterator it(directory, failed), end; !failed && it != end;
       it.increment(failed)) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(it->path(), gone).string();
    if (!target.starts_with("/dev/infiniband/") && target != "/dev/gdrdrv") continue;
    return fail(refusal({"attach-rdma", Severity::kRed, process.pid(),
                         fmt::format("process {} ({}) has {} open: a network card may know the "
                                     "addresses of its GPU memory",
                                     process.pid().value, process.info().comm, target),
                         "start it with `stasis run`, or leave its memory to the driver"}));
  }
  return {};
}

class Attaching {
 public:
  Attaching(const Environment& env, OpenedTree& opened, const AttachOptions& options,
            Phases& phases)
      : env_(env),
        tree_(opened.tree),
        options_(options),
        phases_(phases),
        timeout_(options.timeout.count() == 0 ? kForEver : options.timeout) {}

  Result<void> run() {
    STASIS_TRY(sort());
    if (to_adopt_.empty()) return report_.empty() ? have_ended() : Result<void>();
    STASIS_TRY(hook());
    STASIS_TRY(find_agents());
    STASIS_TRY(watch());
    STASIS_TRY(close());
    STASIS_TRY(adopt());
    auto opened = open_gates();
    phases_.runs();
    STASIS_TRY(std::move(opened));
    return fault(FaultPoint::kAttachOpened);
  }

  // After an error: the programs run on, but for these, whose agents do not answer: they let them
  // run when the driver has answered them.
  std::vector<Pid> let_go() {
    std::vector<Pid> standing;
    for (AgentClient& agent : agents_) {
      if (!agent.pidfd().alive() || agent.has_left()) continue;
      if (agent.has_answered() && agent.state() == AgentState::kRunning) continue;
      (void)agent.ask(AgentCommand::kOpen, 0, agent.has_answered() ? kAtOnce : kAfterSilence);
      const bool runs = agent.has_answered() && agent.state() == AgentState::kRunning;
      if (!runs && agent.pidfd().alive() && !agent.has_left()) standing.push_back(agent.pid());
    }
    agents_.clear();
    if (standing.empty()) phases_.runs();
    return standing;
  }
  void dismiss() { agents_.clear(); }
  // After an error: what stays in the programs.
  std::string what_stays() const {
    std::string idle;
    std::string works;
    for (const Process* process : to_adopt_) {
      const Pid pid = process->pid();
      const auto state = attach::read_attach_state(pid);
      if (!state || !*state) continue;
      const auto agent = direct::probe_agent(pid);
      const bool at_work = agent && *agent && (*agent)->origin == AgentOrigin::kAttached;
      std::string& list = at_work ? works : idle;
      list += fmt::format("{}{}", list.empty() ? "" : ", ", pid.value);
    }
    std::string out;
    if (!works.empty()) out = fmt::format("the agent is at work in process {}", works);
    if (!idle.empty()) {
      out += fmt::format("{}the agent's library stays in process {}, and does nothing",
                         out.empty() ? "" : "; ", idle);
    }
    return out;
  }
  std::vector<AttachedProcess> take_report() { return std::move(report_); }

 private:
  // Which of the processes have an agent, and which are to get one.
  Result<void> sort() {
    for (const TreeMember& member : tree_.members()) {
      if (!member.initial || !member.process.alive()) continue;
      const Pid pid = member.process.pid();
      if (*member.initial != CudaState::kRunning) {
        return fail(ErrorCode::kWrongState,
                    fmt::format("process {} ({}) is {}", pid.value, member.process.info().comm,
                                cuda_state_name(*member.initial)),
                    fmt::format("`stasis resume {}` first", tree_.root().value));
      }
      STASIS_TRY_ASSIGN(const auto agent, direct::probe_agent(pid));
      if (agent && !agent->of_our_version) {
        return fail(refusal({"agent-version", Severity::kRed, pid,
                             fmt::format("process {} ({}) has an agent of another version",
                                         pid.value, member.process.info().comm),
                             "use the stasis that came with that agent"}));
      }
      const bool hooked = agent && agent->origin == AgentOrigin::kHooked;
      const auto library = agent ? AgentLibrary::kNone : agent_library(pid);
      if (library == AgentLibrary::kOff || library == AgentLibrary::kTool)
        return refuse_aside(member.process, library);
      if ((agent && !hooked) || library == AgentLibrary::kWorks) {
        report_.push_back({pid, member.process.info().comm, true, 0, 0, {}});
        if (!agent || agent->origin != AgentOrigin::kAttached) continue;
        STASIS_TRY_ASSIGN(const auto state, attach::read_attach_state(pid));
        if (state) report_.back().left = left_in(*state);
        continue;
      }
      STASIS_TRY(refuse_rdma(member.process));
      if (!hooked) to_hook_.push_back(&member.process);
      if (auto space = proc::AddressSpace::open(pid)) spaces_.emplace(pid, std::move(*space));
      to_adopt_.push_back(&member.process);
      names_[pid] = member.process.info().comm;
    }
    return {};
  }

  static tl::unexpected<Error> refuse_aside(const Process& process, AgentLibrary library) {
    return fail(refusal({"attach", Severity::kRed, process.pid(),
                         fmt::format("process {} ({}) {}", process.pid().value, process.info().comm,
                                     why_inactive(library)),
                         "start it without that"}));
  }

  Result<void> hook() {
    phases_.begin("hook");
    if (to_hook_.empty()) return {};
    // All of a tree are looked at before anything is loaded into the first, and have it loaded
    // before a hook is in one.
    STASIS_TRY(for_each_to_hook([](Pid pid) { return attach::check_for_agent(pid); }));
    STASIS_TRY(
        for_each_to_hook([&](Pid pid) { return attach::load_agent(pid, *options_.way.library); }));
    return for_each_to_hook([&](Pid pid) {
      return attach::hook_agent(pid, timeout_, env_.interrupt,
                                [&](bool still) { note_standing(still); });
    });
  }

  Result<void> for_each_to_hook(const std::function<Result<void>(Pid)>& act) {
    for (const Process* process : to_hook_) {
      STASIS_TRY(env_.interrupt.check());
      auto done = act(process->pid());
      if (done) continue;
      STASIS_TRY(check_still_there(*process));
      const bool gone = done.error().code == ErrorCode::kProcessGone;
      Error& why = done.error();
      if (!gone && why.remedy.empty()) why.remedy = kLeaveIt;
      if (why.code == ErrorCode::kNotSupported && why.obstacles.empty())
        why.obstacles.push_back(
            {"attach", Severity::kRed, process->pid(), why.message, why.remedy});
      return done;
    }
    return {};
  }

  // What was read of one that has ended, or has become another program, says nothing of it.
  Result<void> check_still_there(const Process& process) const {
    const auto gone = [&](std::string_view what) {
      return fail(
          ErrorCode::kProcessGone,
          fmt::format("process {} ({}) has {}", process.pid().value, process.info().comm, what));
    };
    if (process.pidfd().wait_exit(kEndingMs)) return gone("ended");
    const auto space = spaces_.find(process.pid());
    if (space == spaces_.end()) return {};
    const auto current = space->second.check_current();
    if (current || current.error().code != ErrorCode::kProcessGone) return {};
    return gone("become another program (exec), and what it had on the GPU has gone");
  }

  void note_standing(bool still) {
    if (still)
      phases_.stands_still();
    else
      phases_.runs();
  }

  Result<void> find_agents() {
    const auto deadline = Clock::now() + kBegins;
    for (const Process* process : to_adopt_) {
      STASIS_TRY_ASSIGN(auto agent, find_begun_agent(env_, *process, deadline));
      if (!agent) {
        if (!process->alive()) continue;
        return fail(ErrorCode::kTimeout,
                    fmt::format("the agent in process {} has not begun to listen: it needs a "
                                "thread, a descriptor and some memory",
                                process->pid().value),
                    "see the limits of the process (`prlimit --pid`), and try again");
      }
      agents_.add(std::move(*agent));
    }
    STASIS_TRY(fault(FaultPoint::kAttachBegun));
    // What they need for what comes is set aside.
    for (AgentClient& agent : agents_) {
      auto ready = agent.ask(AgentCommand::kPrepare, 1, kAtOnce);
      if (!ready && agent.pidfd().alive()) return ready;
    }
    return {};
  }

  // A graph that is made before the exchange holds the memory that its copies from and to the host
  // name, and no call of the driver tells of such a graph; one that is launched every minute is not
  // seen in half a second. So the user says that there is none such, or in which time all would be
  // seen. Without such a word it ends here, with what was seen in a moment.
  Result<void> watch() {
    if (options_.way.graphs_are_safe) return fault(FaultPoint::kAttachWatched);
    phases_.begin("watch");
    const auto until = Clock::now() + watch_time();
    while (Clock::now() < until) {
      STASIS_TRY(env_.interrupt.check());
      const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
      std::this_thread::sleep_for(std::min(left, milliseconds(20)));
    }
    std::vector<const Process*> uncertain;
    for (const Process* process : to_adopt_) {
      if (!process->alive()) continue;
      STASIS_TRY_ASSIGN(const auto state, attach::read_attach_state(process->pid()));
      if (!state) STASIS_TRY(check_still_there(*process));
      STASIS_TRY(judge(*process, state.value_or(AttachState{})));
      uncertain.push_back(process);
    }
    for (const Process* process : uncertain)
      STASIS_TRY(want_word(*process));
    return fault(FaultPoint::kAttachWatched);
  }

  milliseconds watch_time() const { return options_.way.watch.value_or(kWatchWithoutWord); }
  double watched_seconds() const { return std::chrono::duration<double>(watch_time()).count(); }

  static Result<void> refuse_graphs(const Process& process, const AttachState& state) {
    if (state.graphs == 0) return {};
    return fail(refusal({"attach-graphs", Severity::kRed, process.pid(),
                         fmt::format("process {} ({}) makes or launches CUDA graphs",
                                     process.pid().value, process.info().comm),
                         kGraphsRemedy}));
  }

  Result<void> judge(const Process& process, const AttachState& state) const {
    STASIS_TRY(refuse_graphs(process, state));
    const std::string who =
        fmt::format("process {} ({})", process.pid().value, process.info().comm);
    if (state.calls != 0) return {};
    return fail(refusal(
        {"attach-graphs-unknown", Severity::kRed, process.pid(),
         fmt::format("{} gave the GPU nothing to do for {} s, so it is not known whether it uses "
                     "CUDA graphs",
                     who, watched_seconds()),
         options_.way.watch
             ? fmt::format("watch it longer (--watch-graphs 60s) while it works; {}", kGraphsRemedy)
             : kWordRemedy}));
  }

  // Of one that has launched none while it was watched, and may have one all the same.
  Result<void> want_word(const Process& process) const {
    const std::string seen = fmt::format(
        "process {} ({}) was watched for {} s and neither made nor launched a CUDA graph",
        process.pid().value, process.info().comm, watched_seconds());
    if (!options_.way.watch) {
      return fail(refusal(
          {"attach-graphs-unknown", Severity::kRed, process.pid(),
           seen + ", which does not show that it has none: one that it launches less often, with a "
                  "copy from or to the host in it, would end it with error 719 at the next launch",
           kWordRemedy}));
    }
    env_.tell(seen +
              "; if it has one all the same, with a copy from or to the host in it, that graph's "
              "next launch ends with error 719");
    return {};
  }

  // At a moment at which no work of theirs is under way, in slices between which all gates are
  // open.
  Result<void> close() {
    phases_.begin("close");
    std::deque<DrainedRank> ranks;
    ProcessTree::Gates gates;
    for (AgentClient& agent : agents_)
      if (Process* process = process_of(agent.pid()))
        gates[agent.pid()] = &ranks.emplace_back(agent, *process);
    STASIS_TRY(tree_.hold_back(gates, options_.timeout, env_.interrupt,
                               [&](bool still) { note_standing(still); }));
    agents_.drop_ended();
    // Those that had an agent already.
    STASIS_TRY(tree_.unlock());
    return fault(FaultPoint::kAttachDrained);
  }

  Process* process_of(Pid pid) {
    for (TreeMember& member : tree_.members())
      if (member.process.pid() == pid) return &member.process;
    return nullptr;
  }

  // Of the time since watch(), too: with the gates closed no more come.
  Result<void> refuse_late_graphs() {
    if (options_.way.graphs_are_safe) return {};
    for (const AgentClient& agent : agents_) {
      STASIS_TRY_ASSIGN(const auto state, attach::read_attach_state(agent.pid()));
      const Process* process = process_of(agent.pid());
      if (state && process) STASIS_TRY(refuse_graphs(*process, *state));
    }
    return {};
  }

  Result<void> adopt() {
    STASIS_TRY(refuse_late_graphs());
    phases_.begin("find");
    for (AgentClient& agent : agents_)
      agent.begin(AgentCommand::kAdopt, direct::kLook);
    Result<void> found;
    // The time limit is the user's, and may be that of a lock; a look takes what it takes.
    const auto deadline = Clock::now() + timeout_ + kAtOnce;
    for (AgentClient& agent : agents_) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
      auto one = agent.finish_unless(env_.interrupt, std::max(left, milliseconds(1)));
      if (!one && agent.pidfd().alive() && found) found = std::move(one);
    }
    STASIS_TRY(std::move(found));
    STASIS_TRY(fault(FaultPoint::kAttachFound));
    phases_.begin("exchange");
    STASIS_TRY(drop_ended());
    for (AgentClient& agent : agents_) {
      STASIS_TRY(env_.interrupt.check());
      auto done = exchange_memory(env_, agent, timeout_);
      if (!agent.pidfd().alive()) continue;
      const auto state = attach::read_attach_state(agent.pid());
      if (done && state && *state) note(agent.pid(), **state);
      if (!done) return fail(of_failure(agent.pid(), std::move(done.error()), state));
    }
    STASIS_TRY(drop_ended());
    return fault(FaultPoint::kAttachExchanged);
  }

  // Which takes no call of the driver's.
  Result<void> open_gates() {
    for (AgentClient& agent : agents_)
      agent.begin(AgentCommand::kOpen, 0);
    Result<void> done;
    const auto deadline = Clock::now() + kAtOnce;
    for (AgentClient& agent : agents_) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
      auto answered = agent.finish(std::max(left, milliseconds(1)));
      if (!answered) done = std::move(answered);
    }
    return done;
  }

  Result<void> drop_ended() {
    agents_.drop_ended();
    return agents_.empty() ? have_ended() : Result<void>();
  }

  Result<void> have_ended() const {
    return fail(ErrorCode::kProcessGone,
                fmt::format("the processes below {} that were to be attached to have ended",
                            tree_.root().value),
                "see why they ended, and start the program again");
  }

  Error of_failure(Pid pid, Error why, const Result<std::optional<AttachState>>& state) const {
    if (state && *state && (*state)->lost_bytes != 0) {
      why.code = ErrorCode::kNotRolledBack;
      why.message = fmt::format(
          "process {} has lost {} of its GPU memory: neither the agent nor the "
          "driver got the address again: {}",
          pid.value, format_bytes((*state)->lost_bytes), why.message);
      why.remedy = "end the program: what it does with that memory fails";
    }
    return why;
  }

  void note(Pid pid, const AttachState& state) {
    report_.push_back(
        {pid, names_[pid], false, state.converted_count, state.converted_bytes, left_in(state)});
  }

  static std::vector<AttachedProcess::Left> left_in(const AttachState& state) {
    std::vector<AttachedProcess::Left> left;
    for (unsigned kind = 0; kind < attach::kLeftKinds; ++kind) {
      if (state.left_count[kind] == 0) continue;
      left.push_back({kLeftNames.at(kind), state.left_count[kind], state.left_bytes[kind]});
    }
    return left;
  }

  const Environment& env_;
  ProcessTree& tree_;
  const AttachOptions& options_;
  Phases& phases_;
  milliseconds timeout_;
  std::vector<const Process*> to_hook_;
  std::vector<const Process*> to_adopt_;
  std::map<Pid, proc::AddressSpace> spaces_;  // as they were looked at
  std::map<Pid, std::string> names_;
  AgentSet agents_;
  std::vector<AttachedProcess> report_;
};

// Why no thread of the process runs, its agent's among them.
struct Hold {
  std::string words;
  std::string remedy;
};
std::optional<Hold> what_holds(Pid pid) {
  const auto state = proc::ProcFs().state(pid);
  if (state && *state == 'T')
    return Hold{"stopped by a signal", fmt::format("kill -CONT {}", pid.value)};
  const auto frozen = proc::frozen_cgroup(pid);
  if (!frozen) return std::nullopt;
  return Hold{"frozen with its cgroup " + frozen->directory,
              fmt::format("echo {} >{}/{}", frozen->version1 ? "THAWED" : "0", frozen->directory,
                          frozen->version1 ? "freezer.state" : "cgroup.freeze")};
}

// The gate of these is closed, and their agents are still at work: each opens it by itself when it
// has done, or when the driver has answered it.
Error with_standing(Error why, Pid root, const std::vector<Pid>& standing) {
  if (standing.empty()) return why;
  std::string list;
  for (const Pid pid : standing)
    list += fmt::format("{}{}", list.empty() ? "" : ", ", pid.value);
  why.code = ErrorCode::kNotRolledBack;
  for (const Pid pid : standing) {
    const auto hold = what_holds(pid);
    if (!hold) continue;
    why.message +=
        fmt::format("; process {} is {}, and the agent in it with it", pid.value, hold->words);
    why.remedy = fmt::format(
        "let it go on with `{}`: the agent then does what is left, and lets the program run by "
        "itself; `stasis recover {}` waits for that",
        hold->remedy, root.value);
    return why;
  }
  why.message += fmt::format(
      "; process {} stands still: the agent there is still exchanging memory, or waits for a call "
      "of the driver",
      list);
  why.remedy = fmt::format(
      "wait: when the agent has done, the program runs on by itself, and `stasis recover {1}` "
      "waits for that; what the driver waits for says `cat /proc/{0}/task/*/wchan`; if it never "
      "answers, end the program with `kill -9 {2}`",
      standing.front().value, root.value, list.substr(0, list.find(',')));
  return why;
}

// What an agent says that has refused is written for verbs that can be told to go without it.
Error with_our_remedy(Error why) {
  if (why.remedy.find("--path direct") != std::string::npos) why.remedy = kLeaveIt;
  return why;
}

// What an error of attach_first() says besides: of those that the operation itself would not meet.
Error with_other_way(Error why) {
  if (why.code != ErrorCode::kNotSupported && why.code != ErrorCode::kTimeout &&
      why.code != ErrorCode::kBusy)
    return why;
  why.remedy += fmt::format("{}without --attach the driver moves its GPU memory",
                            why.remedy.empty() ? "" : "; ");
  return why;
}

Result<AttachReport> attach_tree(const Environment& env, Pid root, const AttachOptions& options,
                                 bool is_first, Phases& phases) {
  STASIS_TRY_ASSIGN(auto opened, open_tree(env, Operation::kAttach, root, {}));
  STASIS_TRY(refuse_obstacles(env, opened, options.ignore_obstacles));
  ProcessTree& tree = opened.tree;
  STASIS_TRY(refuse_unstoppable(tree));
  Attaching attaching(env, opened, options, phases);
  auto done = attaching.run();
  phases.end();
  if (done) done = verify_states(tree, CudaState::kRunning);
  if (!done) {
    const auto standing = attaching.let_go();
    Error why = with_standing(with_our_remedy(std::move(done.error())), root, standing);
    if (is_first) why = with_other_way(std::move(why));
    return fail(roll_back(env, opened, std::move(why), attaching.what_stays()));
  }
  attaching.dismiss();
  tree.dismiss();
  opened.journal->finish();
  AttachReport report;
  report.root = root;
  report.attached = attaching.take_report();
  report.processes = report_processes(tree);
  report.total = phases.total();
  report.downtime = phases.downtime();
  report.was_so = std::all_of(report.attached.begin(), report.attached.end(),
                              [](const AttachedProcess& one) { return one.was_so; });
  report.lock_tries = tree.lock_tries();
  for (const AttachedProcess& one : report.attached)
    report.direct_bytes += one.converted_bytes;
  return report;
}

}  // namespace

Result<AttachReport> attach_agents(const Environment& env, Pid root, const AttachOptions& options) {
  Phases phases;
  auto report = attach_tree(env, root, options, false, phases);
  if (report) report->phases = phases.take();
  return report;
}

Result<void> attach_first(const Environment& env, Pid root, const AttachOptions& options,
                          Phases& phases) {
  STASIS_TRY_ASSIGN(const auto status, probe(env, root));
  if (status.running == 0) return {};
  STASIS_TRY_ASSIGN(const auto report, attach_tree(env, root, options, true, phases));
  for (const AttachedProcess& one : report.attached) {
    if (one.was_so) continue;
    std::uint64_t left = 0;
    for (const AttachedProcess::Left& part : one.left)
      left += part.bytes;
    env.tell(
        fmt::format("process {} ({}) has an agent now, which has {} of its GPU memory{}",
                    one.pid.value, one.comm, format_bytes(one.converted_bytes),
                    left == 0 ? "" : fmt::format("; {} stay with the driver", format_bytes(left))));
  }
  return {};
}

}  // namespace stasis
