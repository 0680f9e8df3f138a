#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/verbs.h"

namespace stasis::cli {
namespace {

struct InspectArguments {
  InspectOptions inspect;
  std::optional<std::string> device_map;
};

std::uint64_t gpu_bytes(const ProcessRecord& process) {
  std::uint64_t sum = 0;
  for (const GpuMemoryRecord& use : process.gpu_memory)
    sum += use.bytes;
  return sum;
}

// All that comes from an image is shown through this: it may have been made by anybody.
std::string shown(std::string_view text) { return printable(text); }

std::string process_text(const ProcessRecord& process) {
  std::string command;
  for (const std::string& word : process.command)
    command += " " + word;
  std::string out = std::to_string(process.pid.value) + shown(command);
  if (process.cuda) {
    out += fmt::format("  [CUDA, {}", image_cuda_state_name(*process.cuda_state));
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

// The tree with lines, as `pstree` draws it. A manifest from anybody may name parents in a circle,
// and be as deep as it has processes: each is shown once, at most kMostShown of them.
std::string tree_text(const Manifest& manifest) {
  std::multimap<int, const ProcessRecord*> children;
  for (const ProcessRecord& process : manifest.processes)
    children.emplace(process.parent.value, &process);
  struct Line {
    const ProcessRecord* process;
    std::string before;  // the lines of those above it
    const char* branch;
    std::size_t depth;
  };
  std::vector<Line> waiting;  // the next one at the end
  for (const ProcessRecord& process : manifest.processes)
    if (process.pid != manifest.root) waiting.push_back({&process, "", "", 0});
  std::reverse(waiting.begin(), waiting.end());
  for (const ProcessRecord& process : manifest.processes)
    if (process.pid == manifest.root) waiting.push_back({&process, "", "", 0});
  std::set<int> drawn;
  std::string out;
  while (!waiting.empty() && drawn.size() < kMostShown) {
    const Line line = waiting.back();
    waiting.pop_back();
    if (!drawn.insert(line.process->pid.value).second) continue;
    out += (out.empty() ? "" : "\n") + line.before + line.branch + process_text(*line.process);
    std::string before = line.before;
    if (line.depth > 0 && line.depth < kDeepestShown)
      before += std::string_view(line.branch).starts_with("└") ? "   " : "│  ";
    const auto [begin, end] = children.equal_range(line.process->pid.value);
    const char* branch = "└─ ";
    for (auto child = end; child != begin;) {
      --child;
      waiting.push_back({child->second, before, branch, line.depth + 1});
      branch = "├─ ";
    }
  }
  if (drawn.size() < manifest.processes.size())
    out +=
        fmt::format("\n… and {} more; --json shows all", manifest.processes.size() - drawn.size());
  return out;
}

void print_text(Context& context, const ImageReport& report, bool verified) {
  const Manifest& m = report.manifest;
  // "name       text", the lines of the text below one another.
  const auto show = [&](std::string_view name, std::string_view text) {
    std::string out;
    while (true) {
      const std::size_t end = text.find('\n');
      out += fmt::format("{}{:<9} {}", out.empty() ? "" : "\n", out.empty() ? name : "",
                         text.substr(0, end));
      if (end == std::string_view::npos) break;
      text.remove_prefix(end + 1);
    }
    context.terminal.out_block(out);
  };
  show("image", fmt::format("{}, {} in {} files{}", shown(report.path), format_bytes(m.total_bytes),
                            m.files.size(), m.sync == SyncPolicy::kDisk ? "" : ", not synced"));
  show("made", fmt::format("{} on {} by stasis {}\nkernel {}, CRIU {}, driver {}", m.created,
                           shown(m.hostname), shown(m.stasis_version), shown(m.kernel_release),
                           full_criu_version(m.criu_version),
                           m.driver_version.empty() ? "unknown" : shown(m.driver_version)));
  show("tree", tree_text(m));
  std::string gpus;
  for (const GpuRecord& gpu : m.gpus) {
    gpus += fmt::format("{}{} {} {}, {}", gpus.empty() ? "" : "\n", shown(gpu.uuid),
                        shown(gpu.pci_bus_id), shown(gpu.name), format_bytes(gpu.total_memory));
  }
  show("GPUs", gpus.empty() ? "none" : gpus);
  std::string sizes;
  for (const ImagePart& part : report.parts)
    sizes +=
        fmt::format("{}{:>10}  {}", sizes.empty() ? "" : "\n", format_bytes(part.bytes), part.what);
  show("sizes", sizes);
  std::string times;
  for (const PhaseRecord& phase : m.phases)
    times += fmt::format("{}{} {}", times.empty() ? "" : ", ", shown(phase.name),
                         format_seconds(Seconds(phase.seconds)));
  show("times", times);
  std::string words;
  for (const std::string& word : options_used(m.criu_options))
    words += (words.empty() ? "" : "\n") + shown(word);
  show("options", words);
  std::string here;
  if (restorable(report)) {
    here = verified
               ? "nothing known stands in the way of a restore on this machine, now"
               : "nothing known stands in the way of a restore on this machine, now; the pages "
                 "were not read (--verify)";
  }
  for (const RestoreCheck& check : report.checks) {
    if (!check.error) continue;
    here += fmt::format("{}cannot be restored: {} ({})", here.empty() ? "" : "\n",
                        shown(check.error->to_string()), error_code_name(check.error->code));
    if (!check.error->remedy.empty()) here += "\n  what to do: " + shown(check.error->remedy);
  }
  show("here", here);
}

Result<int> run_inspect(Context& context, InspectArguments& arguments) {
  if (arguments.device_map) {
    auto map = parse_gpu_map(*arguments.device_map);
    if (!map) return fail(std::move(map.error()));
    arguments.inspect.gpu_map = std::move(*map);
  }
  auto driver = context.load_bounded_driver();
  std::optional<Environment> env;
  if (driver) env.emplace(context.environment(**driver));
  const auto report = inspect(env ? &*env : nullptr, driver ? Error() : driver.error(),
                              arguments.inspect, context.terminal, context.interrupt);
  if (!report) return fail(report.error());
  if (context.json) {
    context.print(to_json(*report));
  } else {
    print_text(context, *report, arguments.inspect.verify);
  }
  for (const RestoreCheck& check : report->checks)
    if (check.error) return exit_status(check.error->code);
  return 0;
}

}  // namespace

Verb add_inspect(CLI::App& app) {
  auto arguments = std::make_shared<InspectArguments>();
  CLI::App* command = app.add_subcommand(
      "inspect",
      "say what is in an image and whether it can be restored here; the exit status is that of "
      "the first reason why not");
  command
      ->add_option("DIR,-D,--images-dir", arguments->inspect.images_dir, "directory of the image")
      ->required()
      ->type_name("DIR");
  command->add_flag("--verify", arguments->inspect.verify, "read every byte and compare checksums");
  add_device_map(*command, arguments->device_map);
  add_criu_path(*command, arguments->inspect.criu_path);
  return {command, [arguments](Context& context) { return run_inspect(context, *arguments); },
          false, true};
}

}  // namespace stasis::cli
