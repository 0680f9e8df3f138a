#include <pwd.h>
#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>

#include "checkpoint/journal.h"
#include "checkpoint/process.h"
#include "cli/verbs.h"

namespace stasis::cli {
namespace {

struct Row {
  Pid pid;
  std::string user;
  std::string state;  // a CUDA state, or "?" for a process we may not ask
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
      return entry.under_way
                 ? fmt::format("stasis {} ({})", entry.record.operation, entry.record.owner.value)
                 : fmt::format("left behind by stasis {}", entry.record.operation);
    }
  }
  return {};
}

// Only processes that map the driver's library are asked: the driver itself says nothing about
// those of others, and a query for each process of a large host would take long.
Result<std::vector<Row>> collect(Driver& driver, std::size_t& not_permitted) {
  const proc::ProcFs procfs;
  auto everyone = procfs.all();
  if (!everyone) return fail(std::move(everyone.error()));
  std::vector<JournalEntry> journal;
  if (auto entries = read_journal()) journal = std::move(*entries);
  std::map<Pid, std::vector<GpuUse>> memory;
  bool memory_known = false;
  std::vector<Row> rows;
  for (const proc::ProcessInfo& info : *everyone) {
    auto maps = procfs.maps_file(info.pid, "libcuda.so");
    if (!maps && maps.error().code == ErrorCode::kNotPermitted) ++not_permitted;
    if (!maps || !*maps) continue;
    auto process = Process::open(driver, info.pid);
    if (!process) continue;
    auto state = process->cuda_state();
    if (state && !*state) continue;
    if (!memory_known) {
      memory_known = true;
      if (auto use = driver.memory_by_process()) memory = std::move(*use);
    }
    Row row;
    row.pid = info.pid;
    row.state = state ? std::string(cuda_state_name(**state)) : "?";
    row.command = info.comm;
    if (auto details = procfs.details(info.pid)) {
      row.user = user_name(details->uid);
      if (!details->argv.empty()) row.command = join(details->argv);
    }
    for (const GpuUse& use : memory[info.pid])
      row.gpu_bytes += use.bytes;
    row.under = under(journal, info);
    rows.push_back(std::move(row));
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.pid < b.pid; });
  return rows;
}

}  // namespace

Verb add_ps(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("ps", "list the processes that use CUDA, and the state of each");
  return {command, [](Context& context) -> Result<int> {
            auto driver = context.load_driver();
            if (!driver) return fail(std::move(driver.error()));
            std::size_t not_permitted = 0;
            auto rows = collect(**driver, not_permitted);
            if (!rows) return fail(std::move(rows.error()));
            // Root meets them too, in containers that hide the host's first process.
            if (not_permitted > 0 && (::geteuid() != 0 || context.verbose > 0)) {
              context.terminal.note(
                  fmt::format("{} processes could not be asked: not permitted{}", not_permitted,
                              ::geteuid() != 0 ? "; run as root to see them" : ""));
            }
            if (context.json) {
              nlohmann::json processes = nlohmann::json::array();
              for (const Row& row : *rows) {
                processes.push_back({{"pid", row.pid.value},
                                     {"user", row.user},
                                     {"state", row.state},
                                     {"gpu_bytes", row.gpu_bytes},
                                     {"operation", row.under},
                                     {"command", row.command}});
              }
              context.terminal.out(json_text(
                  {{"ok", true}, {"processes", processes}, {"not_permitted", not_permitted}}));
              return 0;
            }
            std::vector<std::vector<std::string>> lines = {
                {"PID", "USER", "STATE", "GPU MEMORY", "OPERATION", "COMMAND"}};
            for (const Row& row : *rows) {
              lines.push_back({std::to_string(row.pid.value), row.user, row.state,
                               row.gpu_bytes > 0 ? format_bytes(row.gpu_bytes) : "-",
                               row.under.empty() ? "-" : row.under, row.command});
            }
            context.terminal.out(table(lines));
            return 0;
          }};
}

}  // namespace stasis::cli
