#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "base/scope_guard.h"
#include "checkpoint/journal.h"
#include "checkpoint/process.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

// An answer takes 0.2 ms (H100, driver 580.159.04).
constexpr std::chrono::milliseconds kPatience{1000};

struct Row {
  Pid pid;
  std::string user;
  // A CUDA state; without an answer "busy", "stopped" or "traced", and "?" for another reason.
  std::string state;
  std::string reason;  // why there is no CUDA state; empty if there is one
  std::uint64_t gpu_bytes = 0;
  std::string under;  // "stasis dump (12)", "left behind by stasis dump", or empty
  std::string command;
};

std::string user_name(unsigned uid) {
  const passwd* entry = ::getpwuid(uid);
  return entry != nullptr ? entry->pw_name : std::to_string(uid);
}

std::string join(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words)
    out += (out.empty() ? "" : " ") + word;
  return out;
}

std::string under(const std::vector<JournalEntry>& journal, const proc::ProcessInfo& info) {
  for (const JournalEntry& entry : journal) {
    for (const JournalTarget& target : entry.record.targets) {
      if (target.pid != info.pid) continue;
      if (target.start_ticks != 0 && target.start_ticks != info.start_ticks) continue;
      return entry.under_way ? fmt::format("{} ({})", operation_name(entry.record.operation),
                                           entry.record.owner.value)
                             : "left behind by " + operation_name(entry.record.operation);
    }
  }
  return {};
}

// One question to the driver, on a thread that is left behind if there is no answer in time: what
// is at work on a process keeps everybody waiting who asks about it (driver 580).
struct Question {
  explicit Question(Process about) : process(std::move(about)) {}

  static void ask(const std::shared_ptr<Question>& question) {
    std::thread([question] {
      auto state = question->process.cuda_state();
      const std::scoped_lock lock(question->mutex);
      question->answer.emplace(std::move(state));
      question->answered.notify_one();
    }).detach();
  }
  // Nothing if the time is over.
  std::optional<Result<std::optional<CudaState>>> wait(Clock::time_point until) {
    std::unique_lock lock(mutex);
    answered.wait_until(lock, until, [this] { return answer.has_value(); });
    return answer;
  }

  Process process;
  std::mutex mutex;
  std::condition_variable answered;
  std::optional<Result<std::optional<CudaState>>> answer;
};

struct Collected {
  std::vector<Row> rows;
  std::size_t not_permitted = 0;
  bool threads_left = false;  // that use the driver
};

// Why a process does not answer, in a word: "stopped", "traced" or "?".
std::string standstill(const proc::ProcFs& procfs, Pid pid) {
  auto info = procfs.process(pid);
  auto details = procfs.details(pid);
  if ((info && info->state == 't') || (details && details->tracer != 0)) return "traced";
  return info && info->state == 'T' ? "stopped" : "?";
}

// Only processes that map the driver's library are asked: the driver itself says nothing about
// those of others, and a query for each process of a large host would take long.
Result<Collected> collect(Driver& driver, std::chrono::milliseconds patience) {
  Collected out;
  const proc::ProcFs procfs;
  auto everyone = procfs.all();
  if (!everyone) return fail(std::move(everyone.error()));
  std::vector<std::shared_ptr<Question>> questions;
  for (const proc::ProcessInfo& info : *everyone) {
    auto maps = procfs.maps_file(info.pid, "libcuda.so");
    if (!maps && maps.error().code == ErrorCode::kNotPermitted) ++out.not_permitted;
    if (!maps || !*maps) continue;
    auto process = Process::open(driver, info.pid);
    if (!process) continue;
    questions.push_back(std::make_shared<Question>(std::move(*process)));
    Question::ask(questions.back());
  }
  const auto until = Clock::now() + patience;
  std::vector<std::pair<std::shared_ptr<Question>, Row>> found;
  for (const auto& question : questions) {
    const auto answer = question->wait(until);
    if (!answer) out.threads_left = true;
    if (answer && *answer && !**answer) continue;
    Row row;
    if (!answer) {
      row.state = "busy";
      row.reason = fmt::format("no answer within {} ms", patience.count());
    } else if (!*answer) {
      if (!question->process.alive()) continue;
      row.state = standstill(procfs, question->process.pid());
      row.reason = answer->error().to_string();
    } else {
      row.state = cuda_state_name(***answer);
    }
    found.emplace_back(question, std::move(row));
  }
  // After the questions: what began meanwhile may be why one has no answer.
  std::vector<JournalEntry> journal;
  if (auto entries = read_journal()) journal = std::move(*entries);
  std::map<Pid, std::vector<GpuUse>> memory;
  if (!found.empty()) {
    if (auto use = driver.memory_by_process()) memory = std::move(*use);
  }
  for (auto& [question, row] : found) {
    const proc::ProcessInfo& info = question->process.info();
    row.pid = info.pid;
    row.command = info.comm;
    if (auto details = procfs.details(info.pid)) {
      row.user = user_name(details->uid);
      if (!details->argv.empty()) row.command = join(details->argv);
    }
    for (const GpuUse& use : memory[info.pid])
      row.gpu_bytes += use.bytes;
    row.under = under(journal, info);
    out.rows.push_back(std::move(row));
  }
  std::sort(out.rows.begin(), out.rows.end(),
            [](const Row& a, const Row& b) { return a.pid < b.pid; });
  return out;
}

Result<int> run(Context& context, std::chrono::milliseconds patience) {
  auto driver = context.load_driver();
  if (!driver) return fail(std::move(driver.error()));
  auto collected = collect(**driver, patience);
  if (!collected) return fail(std::move(collected.error()));
  // Threads that still wait for the driver must not see it go.
  const ScopeGuard leave([&context, threads_left = collected->threads_left] {
    if (!threads_left) return;
    ::_exit(context.terminal.report_lost_output() || std::uncaught_exceptions() > 0 ? 1 : 0);
  });
  const std::vector<Row>& rows = collected->rows;
  const std::size_t not_permitted = collected->not_permitted;
  // Root meets them too, in containers that hide the host's first process.
  if (not_permitted > 0 && (::geteuid() != 0 || context.verbose > 0)) {
    context.terminal.note(fmt::format("{} processes could not be asked: not permitted{}",
                                      not_permitted,
                                      ::geteuid() != 0 ? "; run as root to see them" : ""));
  }
  if (context.json) {
    nlohmann::json processes = nlohmann::json::array();
    for (const Row& row : rows) {
      processes.push_back({{"pid", row.pid.value},
                           {"user", row.user},
                           {"state", row.state},
                           {"reason", row.reason},
                           {"gpu_bytes", row.gpu_bytes},
                           {"operation", row.under},
                           {"command", row.command}});
    }
    context.print({{"ok", true}, {"processes", processes}, {"not_permitted", not_permitted}});
    return 0;
  }
  std::vector<std::vector<std::string>> lines = {
      {"PID", "USER", "STATE", "GPU MEMORY", "OPERATION", "COMMAND"}};
  for (const Row& row : rows) {
    if (row.state == "?") {
      context.terminal.note(fmt::format("the state of process {}: {}", row.pid.value, row.reason));
    }
    lines.push_back({std::to_string(row.pid.value), row.user, row.state,
                     row.gpu_bytes > 0 ? format_bytes(row.gpu_bytes) : "-",
                     row.under.empty() ? "-" : row.under, row.command});
  }
  context.terminal.out_block(table(lines));
  return 0;
}

}  // namespace

Verb add_ps(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("ps", "list the processes that use CUDA, and the state of each");
  auto patience = std::make_shared<std::chrono::milliseconds>(kPatience);
  add_time_limit(*command, *patience, "a process that does not answer is \"busy\"");
  return {command, [patience](Context& context) { return run(context, *patience); }, false};
}

}  // namespace stasis::cli
