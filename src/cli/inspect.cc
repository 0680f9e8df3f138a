#include <algorithm>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/help.h"
#include "cli/verbs.h"
#include "operations/image_report.h"

namespace stasis::cli {
namespace {

struct InspectArguments {
  InspectOptions inspect;
  std::optional<std::string> device_map;
};

// All that comes from an image is shown through this: it is untrusted.
std::string shown(std::string_view text) { return printable(text); }

std::string process_text(const ProcessRecord& process) {
  std::string command;
  for (const std::string& word : process.command)
    command += " " + word;
  std::string out = std::to_string(process.pid.value) + shown(command);
  if (process.cuda) {
    out += fmt::format("  [CUDA, {}", cuda_state_name(*process.cuda_state));
    if (const auto bytes = gpu_bytes(process); bytes > 0)
      out += fmt::format(", {} of GPU memory", format_bytes(bytes));
    out += "]";
  }
  if (!process.tcp_ports.empty())
    out += fmt::format("  [TCP {}]", fmt::join(process.tcp_ports, ", "));
  return out;
}

constexpr std::size_t kMostShown = 500;
constexpr std::size_t kDeepestShown = 40;

// With lines, as `pstree` draws it.
std::string tree_text(const Manifest& manifest) {
  const std::vector<TreeLine> lines = tree_lines(manifest, kMostShown);
  std::vector<std::string> before = {""};  // by depth: the lines of those above it
  std::string out;
  for (const TreeLine& line : lines) {
    before.resize(line.depth + 2);
    const char* branch = line.depth == 0 ? "" : line.last ? "└─ " : "├─ ";
    before[line.depth + 1] = before[line.depth];
    if (line.depth > 0 && line.depth < kDeepestShown)
      before[line.depth + 1] += line.last ? "   " : "│  ";
    out += (out.empty() ? "" : "\n") + before[line.depth] + branch + process_text(*line.process);
  }
  if (lines.size() < manifest.processes.size())
    out +=
        fmt::format("\n… and {} more; --json shows all", manifest.processes.size() - lines.size());
  return out;
}

// "name       text", the lines of the text below one another, within the width if there is one.
std::string block(std::string_view name, std::string_view text,
                  const std::optional<std::size_t>& width) {
  const auto fitted = [&](std::string_view line) {
    constexpr std::size_t kIndent = 10;
    if (!width || kIndent + columns_of(line) <= *width) return std::string(line);
    const std::size_t before = std::min(line.find_first_not_of(' '), line.size());
    return std::string(before, ' ') + wrap(line, *width, kIndent + before + 2, kIndent + before);
  };
  std::string out;
  while (true) {
    const std::size_t end = text.find('\n');
    out += fmt::format("{}{:<9} {}", out.empty() ? "" : "\n", out.empty() ? name : "",
                       fitted(text.substr(0, end)));
    if (end == std::string_view::npos) return out;
    text.remove_prefix(end + 1);
  }
}

std::string gpus_text(const Manifest& manifest) {
  std::string gpus;
  for (const GpuRecord& gpu : manifest.gpus) {
    gpus += fmt::format("{}{} {} {}, {}", gpus.empty() ? "" : "\n", shown(gpu.uuid),
                        shown(gpu.pci_bus_id), shown(gpu.name), format_bytes(gpu.total_memory));
  }
  return gpus.empty() ? "none" : gpus;
}

std::string times_text(const Manifest& manifest) {
  std::string times;
  for (const PhaseRecord& phase : manifest.phases)
    times += fmt::format("{}{} {}", times.empty() ? "" : ", ", shown(phase.name),
                         format_seconds(Seconds(phase.seconds)));
  return times;
}

// Whether it can be restored on this machine, or what is in the way.
std::string here_text(const ImageReport& report, bool verified) {
  std::string here;
  if (restorable(report)) {
    here = verified ? "can be restored here, as far as known"
                    : "can be restored here, as far as known; --verify also reads every byte";
  }
  if (is_for_a_job(report.manifest)) {
    here += fmt::format(
        "{}this is a job's image: give the job's directory to `stasis run --images-dir` or `stasis "
        "restore`, which go on from there",
        here.empty() ? "" : "\n");
  }
  if (!report.used_up.empty()) {
    here +=
        fmt::format("{}it can be restored only once, which uses up {}", here.empty() ? "" : "\n",
                    shown(fmt::format("{}", fmt::join(report.used_up, ", "))));
  }
  for (const RestoreCheck& check : report.checks) {
    if (!check.error) continue;
    here += fmt::format("{}cannot be restored: {} ({})", here.empty() ? "" : "\n",
                        shown(check.error->to_string()), error_code_name(check.error->code));
    if (!check.error->remedy.empty()) here += "\n  what to do: " + shown(check.error->remedy);
  }
  return here;
}

void print_text(Context& context, const ImageReport& report, bool verified) {
  const Manifest& m = report.manifest;
  const auto width = Terminal::columns();
  const auto show = [&](std::string_view name, std::string_view text) {
    context.terminal.out_block(block(name, text, width));
  };
  show("image", fmt::format("{}, {} in {} files{}", shown(report.path), format_bytes(m.total_bytes),
                            m.file_count(), m.sync == SyncPolicy::kDisk ? "" : ", not synced"));
  show("made", fmt::format("{} on {} by stasis {}\nkernel {}, CRIU {}, driver {}", m.created,
                           shown(m.hostname), shown(m.stasis_version), shown(m.kernel_release),
                           criu_version_text(m.criu_version),
                           m.driver_version.empty() ? "unknown" : shown(m.driver_version)));
  if (!m.job_name.empty()) show("name", shown(m.job_name));
  if (m.group) {
    show("part", fmt::format("{} of {} of a job of several nodes, dump {}", shown(m.group->name),
                             m.group->parts, shown(m.group->id)));
  }
  show("tree", tree_text(m));
  show("GPUs", gpus_text(m));
  std::string sizes;
  for (const ImagePart& part : report.parts)
    sizes +=
        fmt::format("{}{:>10}  {}", sizes.empty() ? "" : "\n", format_bytes(part.bytes), part.what);
  show("sizes", sizes);
  for (const auto& content : {report.content, report.host_content}) {
    if (!content) continue;
    std::string text = content_text(*content);
    for (const auto& [pid, use] : content->processes)
      text += fmt::format("\nprocess {}: {}", pid.value, content_text(use, content->kind));
    show("content", text);
  }
  show("times", times_text(m));
  std::string words;
  for (const std::string& word : options_used(m.criu_options))
    words += (words.empty() ? "" : "\n") + shown(word);
  show("options", words.empty() ? "none" : words);
  show("here", here_text(report, verified));
}

Result<int> run_inspect(Context& context, InspectArguments& arguments) {
  find_image(context, arguments.inspect.images_dir);
  STASIS_TRY_ASSIGN(const auto report,
                    inspect_image(context, arguments.inspect, arguments.device_map));
  if (context.json) {
    context.print(to_json(report));
  } else {
    print_text(context, report, arguments.inspect.verify);
  }
  return status_of(report);
}

}  // namespace

Result<ImageReport> inspect_image(Context& context, InspectOptions& options,
                                  const std::optional<std::string>& device_map) {
  if (device_map) {
    STASIS_TRY_ASSIGN(auto map, parse_gpu_map(*device_map));
    options.gpu_map = std::move(map);
  }
  auto driver = context.load_driver(Context::Movers::kNone);
  std::optional<Environment> env;
  if (driver) env.emplace(context.environment(**driver));
  return inspect(env ? &*env : nullptr, driver ? Error() : driver.error(), options,
                 context.terminal, context.interrupt);
}

int status_of(const ImageReport& report) {
  for (const RestoreCheck& check : report.checks)
    if (check.error) return exit_status(check.error->code);
  return 0;
}

Verb add_inspect(CLI::App& app) {
  auto arguments = std::make_shared<InspectArguments>();
  CLI::App* command = app.add_subcommand(
      "inspect",
      "say what is in an image and whether it can be restored here; the exit status is that of "
      "the first reason why not");
  command->add_option("DIR,-D,--images-dir", arguments->inspect.images_dir, kImageHelp)
      ->required()
      ->type_name("DIR");
  add_verify_flag(*command, arguments->inspect.verify);
  add_device_map(*command, arguments->device_map);
  add_criu_path(*command, arguments->inspect.criu_path);
  return {command, [arguments](Context& context) { return run_inspect(context, *arguments); },
          false, true, true};
}

}  // namespace stasis::cli
