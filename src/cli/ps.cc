#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/scope_guard.h"
#include "checkpoint/journal.h"
#include "checkpoint/process.h"
#include "checkpoint/suspend_record.h"
#include "cli/help.h"
#include "cli/ps_question.h"
#include "cli/ps_table.h"
#include "cli/verbs.h"
#include "direct/agent_probe.h"
#include "job/registry.h"
#include "operations/image_logs.h"
#include "proc/cgroup.h"
#include "proc/proc_mount.h"
#include "proc/served_files.h"

namespace stasis::cli {
namespace {

// An answer takes 0.2 ms (H100, driver 580.159.04).
constexpr std::chrono::milliseconds kTimeout{1000};

constexpr const char* kLeftBehind = "left behind by ";

using nlohmann::json;

struct PsArguments {
  std::chrono::milliseconds timeout = kTimeout;
  std::optional<double> watch;  // seconds
  bool csv = false;
  bool json = false;
  std::vector<std::string> columns;  // by name; none: all
};

std::string user_name(unsigned uid) {
  const passwd* entry = ::getpwuid(uid);
  return entry != nullptr ? entry->pw_name : std::to_string(uid);
}

// `job`: in whose namespaces it lives, and whose records are about it, too.
std::string under(const std::vector<JournalEntry>& journal, const proc::ProcessInfo& info,
                  const std::optional<job::JobEntry>& job) {
  if (job && job->init.value != 0) {
    // The number of the process that does it is one of that namespace.
    if (const auto entry = job::operation_on(*job, info.id()))
      return entry->under_way ? worker_name(entry->record)
                              : kLeftBehind + command_name(entry->record.operation);
  }
  for (const JournalEntry& entry : journal) {
    for (const JournalTarget& target : entry.record.targets) {
      if (!may_be_same(target, info.id())) continue;
      return entry.under_way
                 ? fmt::format("{} ({})", worker_name(entry.record), entry.record.owner.pid.value)
                 : kLeftBehind + command_name(entry.record.operation);
    }
  }
  return {};
}

// Questions without an answer yet, so that no process is asked again before it has answered.
using Pending = std::vector<std::shared_ptr<Question>>;

// Why a process does not answer, in a word: "stopped", "frozen" or "traced"; empty: not known.
std::string why_silent(const proc::ProcFs& procfs, Pid pid) {
  auto info = procfs.process(pid);
  auto details = procfs.details(pid);
  if ((info && info->state == 't') || (details && details->tracer != 0)) return "traced";
  if (info && info->state == 'T') return "stopped";
  return proc::frozen_cgroup(pid) ? "frozen" : "";
}

// By which its GPU memory goes: where it has an agent that takes memory out, if the process runs;
// where it went, if the process is suspended.
std::string path_of(const std::optional<direct::ProbedAgent>& agent, const std::string& state) {
  if (agent && agent->origin == direct::AgentOrigin::kHooked) return "driver";
  const bool direct = agent && ((state != "checkpointed" && agent->of_our_version) ||
                                direct::is_away(agent->state));
  return direct ? "direct" : "driver";
}

// The name of the job that a process belongs to, by its namespace or by the process that has
// started it.
std::string name_of(Pid pid, const std::vector<job::JobEntry>& jobs,
                    const std::vector<proc::ProcessInfo>& all_processes) {
  if (jobs.empty()) return {};
  if (const auto job = job::job_of(pid, jobs)) return job->name;
  std::map<Pid, Pid> parents;
  for (const proc::ProcessInfo& info : all_processes)
    parents[info.pid] = info.parent;
  for (auto at = parents.find(pid); at != parents.end(); at = parents.find(at->second)) {
    for (const job::JobEntry& entry : jobs)
      if (entry.init.value == 0 && entry.process.pid == at->first) return entry.name;
  }
  return {};
}

// A process that cannot be examined, for another reason than that it is another user's.
Row unread(const proc::ProcFs& procfs, const proc::ProcessInfo& info, const Error& why) {
  Row row;
  row.pid = info.pid;
  row.reason = why.to_string();
  row.command = info.comm;
  if (const auto details = procfs.details(info.pid)) row.user = user_name(details->uid);
  row.since = procfs.started(info).value_or(0);
  return row;
}

// It may use CUDA.
Row unread(const proc::HeldProcess& held) {
  Row row;
  row.pid = held.pid;
  row.reason = proc::keeps_its_memory(held.pid).to_string();
  row.command = held.comm;
  return row;
}

bool has_gone(const Error& why) {
  return why.code == ErrorCode::kNoSuchProcess || why.code == ErrorCode::kZombie ||
         why.code == ErrorCode::kThreadId;
}

// A stasis that has the driver in it moves the memory of others.
bool is_stasis(Pid pid) {
  const auto theirs = proc::known_status(fmt::format("/proc/{}/exe", pid.value));
  const auto ours = proc::known_status("/proc/self/exe");
  return theirs && ours && theirs->st_dev == ours->st_dev && theirs->st_ino == ours->st_ino;
}

// Its memory is away, and was so before. Otherwise a tool is at work on it, in a namespace of its
// own or not: also one that has begun since the journal was read.
void say_whether_it_waits(Row& row, const direct::ProbedAgent& agent, const proc::ProcessInfo& info,
                          const std::optional<job::JobEntry>& job, Clock::time_point until) {
  const auto is_alone = [&] { return row.under.empty() || row.under.starts_with(kLeftBehind); };
  if (!is_alone()) return;
  Pid root = info.pid;
  if (auto journal = read_journal()) {
    row.under = under(*journal, info, job);
    root = left_behind_with(*journal, info.id()).value_or(info.pid);
  }
  const auto later = direct::probe_agent(info.pid, until);
  if (!is_alone() || !later || !*later || !(*later)->waits()) return;
  row.state = "waiting";
  row.reason = agent.until_when(root);
}

using Asked = std::shared_ptr<Question>;

// Only processes that map the driver's library are asked: the driver itself says nothing about
// those of others, and a query for each process of a large host would take long. Those that cannot
// be asked are rows of `out`.
std::vector<Asked> ask_all(Driver& driver, const proc::ProcFs& procfs,
                           const std::vector<proc::ProcessInfo>& all_processes,
                           const Pending& pending, std::chrono::milliseconds timeout,
                           Collected& out) {
  std::vector<Asked> questions;
  std::vector<Pid> pids;
  for (const proc::ProcessInfo& info : all_processes)
    pids.push_back(info.pid);
  const auto with_driver = procfs.maps_file_each(pids, "libcuda.so");
  for (std::size_t i = 0; i < all_processes.size(); ++i) {
    const proc::ProcessInfo& info = all_processes[i];
    const auto& maps = with_driver[i];
    if (!maps && maps.error().code == ErrorCode::kNotPermitted)
      ++out.not_permitted;
    else if (!maps && !has_gone(maps.error()))
      out.rows.push_back(unread(procfs, info, maps.error()));
    if (!maps || !*maps || is_stasis(info.pid)) continue;
    const auto asked = std::find_if(pending.begin(), pending.end(), [&](const auto& one) {
      return one->process.id() == info.id();
    });
    if (asked != pending.end()) {
      questions.push_back(*asked);
      continue;
    }
    auto process = Process::open(driver, info.pid);
    if (!process && !has_gone(process.error()) && process.error().code != ErrorCode::kNotPermitted)
      out.rows.push_back(unread(procfs, info, process.error()));
    if (!process) continue;
    questions.push_back(std::make_shared<Question>(std::move(*process)));
    Question::ask(questions.back(), Clock::now() + timeout);
  }
  return questions;
}

struct Found {
  Asked question;
  Row row;  // the state, and the reason for none
};

// Those that use CUDA. Those without an answer in time stay in `pending`.
std::vector<Found> wait_for_all(const std::vector<Asked>& questions, const proc::ProcFs& procfs,
                                std::chrono::milliseconds timeout, Pending& pending) {
  const auto until = Clock::now() + timeout;
  std::vector<Found> found;
  for (const Asked& question : questions) {
    const auto answer = question->wait(until);
    if (answer) {
      std::erase(pending, question);
    } else if (std::find(pending.begin(), pending.end(), question) == pending.end()) {
      pending.push_back(question);
    }
    if (answer && *answer && !**answer) continue;
    Row row;
    if (!answer) {
      row.state = "busy";
      row.reason = fmt::format("no answer within {} ms", timeout.count());
    } else if (!*answer) {
      if (!question->process.alive()) continue;
      row.state = why_silent(procfs, question->process.pid());
      row.reason = answer->error().to_string();
    } else {
      row.state = cuda_state_name(***answer);
    }
    found.push_back({question, std::move(row)});
  }
  return found;
}

// What all rows are filled from: read after the answers, for what began meanwhile may be why one
// has none.
struct Surroundings {
  std::vector<JournalEntry> journal;
  std::map<Pid, std::vector<GpuUse>> memory;
  std::vector<job::JobEntry> jobs;
  Clock::time_point until;  // agents are looked for once more
};

void fill(Row& row, Question& question, const proc::ProcFs& procfs,
          const std::vector<proc::ProcessInfo>& all_processes, Surroundings& around) {
  const proc::ProcessInfo& info = question.process.info();
  row.pid = info.pid;
  row.name = name_of(info.pid, around.jobs, all_processes);
  row.command = info.comm;
  if (auto details = procfs.details(info.pid)) {
    row.user = user_name(details->uid);
    if (!details->argv.empty()) row.command = fmt::to_string(fmt::join(details->argv, " "));
  }
  row.uses = around.memory[info.pid];
  row.since = procfs.started(info).value_or(0);
  const auto job = job::job_of(info.pid, around.jobs);
  if (row.state == "checkpointed") {
    auto suspended =
        job ? job::recall_suspended_of(*job, question.process) : recall_suspended(question.process);
    if (suspended) {
      row.uses = std::move(suspended->uses);
      row.since = suspended->since;
    } else {
      row.since = 0;  // by another tool
    }
  }
  row.under = under(around.journal, info, job);
  const auto [away_before, agent] = question.agent();
  if (agent) row.path = path_of(*agent, row.state);
  const bool may_wait =
      row.state == "running" && away_before && agent && *agent && (*agent)->waits();
  if (may_wait) say_whether_it_waits(row, **agent, info, job, around.until);
}

Result<Collected> collect(Driver& driver, std::chrono::milliseconds timeout, Pending& pending) {
  Collected out;
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(auto listing, procfs.list());
  for (const proc::HeldProcess& held : listing.held)
    out.rows.push_back(unread(held));
  // What was answered since is no answer to a question of now.
  std::erase_if(pending, [](const auto& one) { return one->wait(Clock::now()).has_value(); });
  auto found = wait_for_all(ask_all(driver, procfs, listing.processes, pending, timeout, out),
                            procfs, timeout, pending);
  Surroundings around;
  around.until = Clock::now() + timeout;
  if (auto entries = read_journal()) around.journal = std::move(*entries);
  if (!found.empty()) {
    if (auto use = driver.memory_by_process()) around.memory = std::move(*use);
    if (auto gpus = driver.gpus()) out.gpus = std::move(*gpus);
  }
  around.jobs = job::all_jobs();
  for (Found& one : found) {
    fill(one.row, *one.question, procfs, listing.processes, around);
    out.rows.push_back(std::move(one.row));
  }
  std::sort(out.rows.begin(), out.rows.end(),
            [](const Row& a, const Row& b) { return a.pid < b.pid; });
  return out;
}

json row_json(const Row& row, const std::vector<Gpu>& gpus) {
  json places = json::array();
  for (const auto& place : places_of(row, gpus))
    places.push_back(place ? json(*place) : json());
  json uses = json::array();
  for (const GpuUse& use : row.uses)
    uses.push_back({{"uuid", use.gpu.to_string()}, {"bytes", use.bytes}});
  const auto or_null = [](const std::string& text) { return text.empty() ? json() : json(text); };
  return {{"pid", row.pid.value},
          {"user", or_null(row.user)},
          {"state", or_null(row.state)},
          {"reason", or_null(row.reason)},
          {"path", or_null(row.path)},
          {"gpus", places},
          {"gpu_bytes", bytes_in_use(row)},
          {"gpu_memory", uses},
          {"since", row.since > 0 ? json(utc_text({row.since, 0})) : json()},
          {"operation", or_null(row.under)},
          {"name", or_null(row.name)},
          {"command", row.command}};
}

// What is worth knowing besides the table.
std::vector<std::string> notes_of(const Collected& collected, bool verbose) {
  std::vector<std::string> out;
  // Root meets them too, in containers that hide the host's first process.
  if (collected.not_permitted > 0 && (::geteuid() != 0 || verbose)) {
    out.push_back(fmt::format("{} processes could not be asked: not permitted{}",
                              collected.not_permitted,
                              ::geteuid() != 0 ? "; run as root to see them" : ""));
  }
  if (proc::proc_hides_others())
    out.emplace_back(
        "/proc shows this user no processes of others (hidepid): there may be more that use CUDA; "
        "run as root to see them");
  for (const Row& row : collected.rows) {
    if (row.state.empty())
      out.push_back(fmt::format("the state of process {}: {}", row.pid.value, row.reason));
    if (row.state == "waiting")
      out.push_back(fmt::format("process {} {}", row.pid.value, row.reason));
  }
  return out;
}

json all_json(const Collected& collected) {
  json processes = json::array();
  for (const Row& row : collected.rows)
    processes.push_back(row_json(row, collected.gpus));
  return {{"ok", true}, {"processes", processes}, {"not_permitted", collected.not_permitted}};
}

void show_once(Context& context, const Collected& collected, const PsArguments& arguments,
               bool header = true) {
  for (const std::string& note : notes_of(collected, context.verbose > 0))
    context.note(note);
  if (context.json) {
    context.print(all_json(collected));
  } else {
    context.terminal.out_block(arguments.csv ? csv_of(collected, arguments.columns, header)
                                             : table_of(collected, arguments.columns));
  }
}

// The notes below the table, where the next look does not wipe them out; JSON in one line; CSV with
// one header.
void show_again(Context& context, const Collected& collected, const PsArguments& arguments,
                bool is_first) {
  if (context.json) {
    json object = all_json(collected);
    object["notes"] = notes_of(collected, context.verbose > 0);
    object["schema_version"] = kSchemaVersion;
    context.terminal.out(object.dump(-1, ' ', true, json::error_handler_t::replace));
    return;
  }
  if (arguments.csv) {
    if (is_first || !collected.rows.empty()) show_once(context, collected, arguments, is_first);
    return;
  }
  std::string text = table_of(collected, arguments.columns);
  for (const std::string& note : notes_of(collected, context.verbose > 0))
    text += "\nnote: " + printable(note);
  context.terminal.clear_screen();
  context.terminal.out_block(text);
}

Result<int> run_ps(Context& context, const PsArguments& arguments) {
  if (arguments.csv && context.json)
    return fail(ErrorCode::kUsage, "--format csv goes not with --json", "ask for one of them");
  context.json = context.json || arguments.json;
  context.session.timeouts.reset();  // each question has a thread of its own instead
  STASIS_TRY_ASSIGN(auto driver, context.load_driver(Context::Movers::kNone));
  Pending pending;
  int status = 0;
  // Threads that still wait for the driver must not see it go.
  const ScopeGuard leave([&] {
    if (pending.empty()) return;
    const bool failed = context.terminal.report_lost_output() || std::uncaught_exceptions() > 0;
    ::_exit(failed && status == 0 ? 1 : status);
  });
  for (bool is_first = true;; is_first = false) {
    auto collected = collect(*driver, arguments.timeout, pending);
    if (!collected) {
      if (pending.empty()) return fail(std::move(collected.error()));
      status = exit_status(collected.error().code);
      if (context.json) context.print(to_json(collected.error()));
      if (!context.json) context.terminal.error(collected.error());
      return status;
    }
    if (!arguments.watch) {
      show_once(context, *collected, arguments);
      return 0;
    }
    show_again(context, *collected, arguments, is_first);
    if (context.terminal.lost_output()) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(*arguments.watch));
  }
}

// Seconds of "2s", "500ms", "0.5"; nothing if it is no such time.
std::optional<double> watch_of(const std::string& text) {
  double seconds = 0;
  if (const auto value = duration_of(text, "s"))
    seconds = std::chrono::duration<double>(*value).count();
  else if (!CLI::detail::lexical_cast(text, seconds))
    return std::nullopt;
  // A number that is none compares false with everything.
  return seconds >= 0.1 && seconds <= 86400 ? std::optional(seconds) : std::nullopt;
}

}  // namespace

Verb add_ps(CLI::App& app) {
  auto arguments = std::make_shared<PsArguments>();
  CLI::App* command =
      app.add_subcommand("ps", "list the processes that use CUDA, and the state of each");
  add_time_limit(*command, arguments->timeout, "a process that does not answer is \"busy\"");
  command
      ->add_option_function<std::string>(
          "-w,--watch",
          [arguments](const std::string& text) {
            arguments->watch = watch_of(text);
            if (!arguments->watch)
              throw CLI::ValidationError(
                  "--watch", "'" + text + "' is no time from 100ms to 24h, as 2s or 0.5 (seconds)");
          },
          "list them again and again, each time after so long, e.g. 500ms; a number without a unit "
          "is seconds [2s]")
      ->type_name("TIME")
      ->expected(0, 1)
      ->default_str("2s");
  command
      ->add_option_function<std::string>(
          "--format",
          [arguments](const std::string& format) {
            arguments->csv = format == "csv";
            arguments->json = format == "json";
          },
          "a table for people; csv with all columns; json as with --json [table]")
      ->check(one_of({"table", "csv", "json"}));
  command
      ->add_option(
          "--columns", arguments->columns,
          fmt::format("these columns, in this order, of {}", fmt::join(column_names(), ", ")))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(one_of(column_names()).description(""))
      ->type_name("NAME,...");
  return {command, [arguments](Context& context) { return run_ps(context, *arguments); }, false};
}

}  // namespace stasis::cli
