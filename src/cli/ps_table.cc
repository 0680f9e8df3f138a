#include "cli/ps_table.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <tuple>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/units.h"
#include "cli/terminal.h"
#include "operations/image_logs.h"

namespace stasis::cli {

std::vector<std::optional<std::size_t>> places_of(const Row& row, const std::vector<Gpu>& gpus) {
  std::vector<std::optional<std::size_t>> out;
  for (const GpuUse& use : row.uses) {
    const auto gpu =
        std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& one) { return one.uuid == use.gpu; });
    out.emplace_back();
    if (gpu != gpus.end()) out.back() = static_cast<std::size_t>(gpu - gpus.begin());
  }
  return out;
}

namespace {

// "0, 2"
std::string gpus_text(const Row& row, const std::vector<Gpu>& gpus) {
  std::string out;
  for (const auto& place : places_of(row, gpus))
    out += (out.empty() ? "" : ", ") + (place ? std::to_string(*place) : "?");
  return out.empty() ? "-" : out;
}

// What a process that does not use its GPU now gets back is in parentheses.
std::string memory_text(const Row& row) {
  const std::uint64_t bytes = total_bytes(row.uses);
  if (bytes == 0) return "-";
  return fmt::format(fmt::runtime(row.state == "checkpointed" ? "({})" : "{}"),
                     format_bytes(bytes));
}

// A column of the table: its name for --columns, its heading, what a person reads in it, and what a
// program does.
struct Column {
  std::string_view name;
  std::string_view heading;
  std::string (*text)(const Row&, const std::vector<Gpu>&);
  std::string (*value)(const Row&, const std::vector<Gpu>&);
  int worth = 0;  // the least goes first where the terminal has no room; 0: stays
};

std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }

std::string age_text(const Row& row, const std::vector<Gpu>&) {
  return row.since > 0 ? format_age(std::chrono::seconds(std::time(nullptr) - row.since)) : "-";
}

// In the order of the table.
constexpr auto kColumns = std::to_array<Column>({
    {"pid", "PID", [](const Row& row, const auto&) { return std::to_string(row.pid.value); },
     [](const Row& row, const auto&) { return std::to_string(row.pid.value); }},
    {"user", "USER", [](const Row& row, const auto&) { return row.user; },
     [](const Row& row, const auto&) { return row.user; }, 1},
    // The verbs' word; for programs it is cuda-checkpoint's.
    {"state", "STATE",
     [](const Row& row, const auto&) {
       if (row.state.empty()) return std::string("?");
       return row.state == "checkpointed" ? std::string("suspended") : row.state;
     },
     [](const Row& row, const auto&) { return row.state; }},
    {"path", "PATH", [](const Row& row, const auto&) { return or_dash(row.path); },
     [](const Row& row, const auto&) { return row.path; }, 2},
    {"gpus", "GPUS", &gpus_text,
     [](const Row& row, const std::vector<Gpu>& gpus) {
       return row.uses.empty() ? std::string() : gpus_text(row, gpus);
     },
     4},
    {"gpu_bytes", "GPU MEMORY", [](const Row& row, const auto&) { return memory_text(row); },
     [](const Row& row, const auto&) { return std::to_string(bytes_in_use(row)); }, 5},
    {"since", "SINCE", &age_text,
     [](const Row& row, const auto&) {
       return row.since > 0 ? utc_text({row.since, 0}) : "";
     },
     3},
    {"operation", "OPERATION", [](const Row& row, const auto&) { return or_dash(row.under); },
     [](const Row& row, const auto&) { return row.under; }, 6},
    {"name", "NAME", [](const Row& row, const auto&) { return or_dash(row.name); },
     [](const Row& row, const auto&) { return row.name; }},
    {"command", "COMMAND", [](const Row& row, const auto&) { return row.command; },
     [](const Row& row, const auto&) { return row.command; }},
});

// Those of --columns in its order; else all, without NAME where no program has one.
std::vector<const Column*> columns_of(const Collected& collected,
                                      const std::vector<std::string>& wanted, bool all) {
  std::vector<const Column*> out;
  for (const std::string& name : wanted) {
    const auto column = std::find_if(kColumns.begin(), kColumns.end(),
                                     [&](const Column& one) { return one.name == name; });
    if (column != kColumns.end()) out.push_back(&*column);
  }
  if (!out.empty()) return out;
  const bool named = std::any_of(collected.rows.begin(), collected.rows.end(),
                                 [](const Row& row) { return !row.name.empty(); });
  for (const Column& column : kColumns)
    if (all || named || column.name != "name") out.push_back(&column);
  return out;
}

}  // namespace

std::uint64_t bytes_in_use(const Row& row) {
  return row.state == "checkpointed" ? 0 : total_bytes(row.uses);
}

std::vector<std::string> column_names() {
  std::vector<std::string> out;
  for (const Column& column : kColumns)
    out.emplace_back(column.name);
  return out;
}

std::string table_of(const Collected& collected, const std::vector<std::string>& wanted) {
  std::vector<const Column*> columns = columns_of(collected, wanted, false);
  const auto width = Terminal::columns();
  for (;;) {
    std::vector<std::vector<std::string>> lines(1);
    for (const Column* column : columns)
      lines.front().emplace_back(column->heading);
    for (const Row& row : collected.rows) {
      lines.emplace_back();
      for (const Column* column : columns)
        lines.back().push_back(column->text(row, collected.gpus));
    }
    // Does all but the command have room, and the beginning of that?
    constexpr std::size_t kCommand = 12;
    std::vector<std::vector<std::string>> short_lines = lines;
    for (auto& line : short_lines)
      if (columns.back()->name == "command") line.back().assign(kCommand, 'x');
    const std::string whole = table(short_lines);
    const std::size_t used = cli::columns_of(std::string_view(whole).substr(0, whole.find('\n')));
    // First what says nothing of any program.
    const auto worth = [&](const Column* column) {
      const bool says =
          std::any_of(collected.rows.begin(), collected.rows.end(),
                      [&](const Row& row) { return column->text(row, collected.gpus) != "-"; });
      return std::tuple(column->worth == 0, says, column->worth);
    };
    auto least =
        std::min_element(columns.begin(), columns.end(),
                         [&](const Column* a, const Column* b) { return worth(a) < worth(b); });
    const bool given = !wanted.empty();
    const bool is_named = std::any_of(columns.begin(), columns.end(),
                                      [](const Column* column) { return column->name == "name"; });
    // A name is whole even where there is no room for it, since other verbs take it. The command,
    // of which nothing would be left, goes.
    const bool has_command = columns.size() > 1 && columns.back()->name == "command";
    const bool too_narrow = width && (has_command ? used + 1 > *width + kCommand : used > *width);
    if (too_narrow && is_named && (given || (*least)->worth == 0)) {
      for (auto& line : lines)
        if (has_command) line.pop_back();
      return table(lines);
    }
    if (!width || used <= *width || given || (*least)->worth == 0) return table(lines, width);
    columns.erase(least);
  }
}

// RFC 4180, but for line feeds alone.
std::string csv_of(const Collected& collected, const std::vector<std::string>& wanted,
                   bool header) {
  const auto quoted = [](const std::string& text) {
    if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
    return "\"" + CLI::detail::find_and_replace(text, "\"", "\"\"") + "\"";
  };
  const std::vector<const Column*> columns = columns_of(collected, wanted, true);
  std::vector<std::string> lines(header ? 1 : 0);
  for (const Column* column : columns)
    if (header) lines[0] += fmt::format("{}{}", lines[0].empty() ? "" : ",", column->name);
  for (const Row& row : collected.rows) {
    std::string line;
    for (const Column* column : columns)
      line += (column == columns.front() ? "" : ",") + quoted(column->value(row, collected.gpus));
    lines.push_back(std::move(line));
  }
  return fmt::to_string(fmt::join(lines, "\n"));
}

}  // namespace stasis::cli
