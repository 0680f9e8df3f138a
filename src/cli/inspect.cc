#include <algorithm>
#include <functional>
#include <map>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/verbs.h"
#include "criu/criu_pages.h"

namespace stasis::cli {
namespace {

using nlohmann::json;

struct InspectArguments {
  InspectOptions inspect;
  std::optional<std::string> device_map;
};

std::string criu_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// By the words of the command line.
std::vector<std::string> options_used(const CriuOptions& criu) {
  std::vector<std::string> out;
  const std::pair<bool, const char*> flags[] = {
      {criu.shell_job, "--shell-job"},      {criu.tcp_established, "--tcp-established"},
      {criu.tcp_close, "--tcp-close"},      {criu.file_locks, "--file-locks"},
      {criu.link_remap, "--link-remap"},    {criu.ext_unix_sk, "--ext-unix-sk"},
      {criu.unprivileged, "--unprivileged"}};
  for (const auto& [set, word] : flags)
    if (set) out.emplace_back(word);
  out.push_back(fmt::format("--ghost-limit {}", criu.ghost_limit));
  for (const std::string& one : criu.external)
    out.push_back("--external " + one);
  out.push_back(fmt::format("--manage-cgroups {}", cgroup_mode_name(criu.cgroups)));
  if (criu.tcp_established)
    out.push_back(fmt::format("--network-lock {}", network_lock_name(criu.network_lock)));
  if (!criu.lsm_profile.empty()) out.push_back("--lsm-profile " + criu.lsm_profile);
  return out;
}

// What the files of an image hold, largest first.
struct Part {
  std::string what;
  std::uint64_t bytes = 0;
};

std::vector<Part> parts_of(const ImageReport& report) {
  const std::map<std::string, Pid> owners = pages_owners(report.path + "/criu", report.manifest);
  std::map<std::string, std::uint64_t> sums;
  for (const FileRecord& file : report.manifest.files) {
    const std::string name = file.path.substr(file.path.find('/') + 1);
    const auto owner = owners.find(name);
    std::string what = "all else";
    if (owner != owners.end()) {
      what = fmt::format("memory of process {}", owner->second.value);
    } else if (name.starts_with("pages-")) {
      what = "shared memory";
    } else if (name.starts_with("ghost-file")) {
      what = "deleted files that are open";
    }
    sums[what] += file.size;
  }
  std::vector<Part> out;
  for (const auto& [what, bytes] : sums)
    out.push_back({what, bytes});
  std::stable_sort(out.begin(), out.end(),
                   [](const Part& a, const Part& b) { return a.bytes > b.bytes; });
  return out;
}

std::uint64_t gpu_bytes(const ProcessRecord& process) {
  std::uint64_t sum = 0;
  for (const GpuMemoryRecord& use : process.gpu_memory)
    sum += use.bytes;
  return sum;
}

std::string process_text(const ProcessRecord& process) {
  std::string out = fmt::format("{} {}", process.pid.value, fmt::join(process.command, " "));
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

// The tree with lines, as `pstree` draws it. A manifest from anybody may name parents in a circle:
// each process is shown once.
std::string tree_text(const Manifest& manifest) {
  std::multimap<int, const ProcessRecord*> children;
  const ProcessRecord* root = nullptr;
  for (const ProcessRecord& process : manifest.processes) {
    if (process.pid == manifest.root)
      root = &process;
    else
      children.emplace(process.parent.value, &process);
  }
  std::string out;
  std::vector<const ProcessRecord*> shown;
  const std::function<void(const ProcessRecord&, const std::string&)> show =
      [&](const ProcessRecord& process, const std::string& indent) {
        shown.push_back(&process);
        out += process_text(process) + "\n";
        const auto [begin, end] = children.equal_range(process.pid.value);
        for (auto child = begin; child != end; ++child) {
          if (std::find(shown.begin(), shown.end(), child->second) != shown.end()) continue;
          const bool last = std::next(child) == end;
          out += indent + (last ? "└─ " : "├─ ");
          show(*child->second, indent + (last ? "   " : "│  "));
        }
      };
  if (root != nullptr) show(*root, "");
  for (const ProcessRecord& process : manifest.processes)
    if (std::find(shown.begin(), shown.end(), &process) == shown.end()) show(process, "");
  out.pop_back();
  return out;
}

bool restorable(const ImageReport& report) {
  return std::none_of(report.checks.begin(), report.checks.end(),
                      [](const RestoreCheck& check) { return check.error.has_value(); });
}

void print_text(Context& context, const ImageReport& report) {
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
  show("image", fmt::format("{}, {} in {} files{}", report.path, format_bytes(m.total_bytes),
                            m.files.size(), m.sync == SyncPolicy::kDisk ? "" : ", not synced"));
  show("made",
       fmt::format("{} on {} by stasis {}\nkernel {}, CRIU {}, driver {}", m.created, m.hostname,
                   m.stasis_version, m.kernel_release, criu_version_text(m.criu_version),
                   m.driver_version.empty() ? "unknown" : m.driver_version));
  show("tree", tree_text(m));
  std::string gpus;
  for (const GpuRecord& gpu : m.gpus) {
    gpus += fmt::format("{}{} {} {}, {}", gpus.empty() ? "" : "\n", gpu.uuid, gpu.pci_bus_id,
                        gpu.name, format_bytes(gpu.total_memory));
  }
  show("GPUs", gpus.empty() ? "none" : gpus);
  std::string sizes;
  for (const Part& part : parts_of(report))
    sizes +=
        fmt::format("{}{:>10}  {}", sizes.empty() ? "" : "\n", format_bytes(part.bytes), part.what);
  show("sizes", sizes);
  std::string times;
  for (const PhaseRecord& phase : m.phases)
    times += fmt::format("{}{} {}", times.empty() ? "" : ", ", phase.name,
                         format_seconds(Seconds(phase.seconds)));
  show("times", times);
  show("options", fmt::format("{}", fmt::join(options_used(m.criu_options), "\n")));
  std::string here = restorable(report) ? "can be restored on this machine, now" : "";
  for (const RestoreCheck& check : report.checks) {
    if (!check.error) continue;
    here += fmt::format("{}cannot be restored: {} ({})", here.empty() ? "" : "\n",
                        check.error->to_string(), error_code_name(check.error->code));
    if (!check.error->remedy.empty()) here += "\n  what to do: " + check.error->remedy;
  }
  show("here", here);
}

json report_json(const ImageReport& report) {
  const Manifest& m = report.manifest;
  json processes = json::array();
  for (const ProcessRecord& process : m.processes) {
    json one = {{"pid", process.pid.value},
                {"parent", process.parent.value},
                {"command", process.command},
                {"cuda", process.cuda},
                {"threads", process.threads.size() + 1},
                {"tcp_ports", process.tcp_ports}};
    if (process.cuda) {
      one["state"] = image_cuda_state_name(*process.cuda_state);
      one["gpu_memory"] = json::array();
      for (const GpuMemoryRecord& use : process.gpu_memory)
        one["gpu_memory"].push_back({{"uuid", use.gpu_uuid}, {"bytes", use.bytes}});
    }
    processes.push_back(std::move(one));
  }
  json gpus = json::array();
  for (const GpuRecord& gpu : m.gpus)
    gpus.push_back({{"uuid", gpu.uuid},
                    {"name", gpu.name},
                    {"pci_bus_id", gpu.pci_bus_id},
                    {"total_memory", gpu.total_memory}});
  json sizes = json::array();
  for (const Part& part : parts_of(report))
    sizes.push_back({{"what", part.what}, {"bytes", part.bytes}});
  json phases = json::array();
  for (const PhaseRecord& phase : m.phases)
    phases.push_back({{"name", phase.name}, {"seconds", phase.seconds}});
  json checks = json::array();
  for (const RestoreCheck& check : report.checks) {
    json one = {{"id", check.id}, {"ok", !check.error}};
    if (check.error) one["error"] = to_json(*check.error)["error"];
    checks.push_back(std::move(one));
  }
  return {{"ok", true},
          {"images_dir", report.path},
          {"image_bytes", m.total_bytes},
          {"files", m.files.size()},
          {"created", m.created},
          {"hostname", m.hostname},
          {"stasis_version", m.stasis_version},
          {"kernel_release", m.kernel_release},
          {"criu_version", criu_version_text(m.criu_version)},
          {"driver_version", m.driver_version},
          {"cuda_version", m.cuda_version},
          {"simulated", m.simulated},
          {"sync", m.sync == SyncPolicy::kDisk ? "disk" : "none"},
          {"pid", m.root.value},
          {"processes", processes},
          {"gpus", gpus},
          {"sizes", sizes},
          {"phases", phases},
          {"options", options_used(m.criu_options)},
          {"restorable", restorable(report)},
          {"checks", checks}};
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
    context.print(report_json(*report));
  } else {
    print_text(context, *report);
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
  return {command, [arguments](Context& context) { return run_inspect(context, *arguments); }};
}

}  // namespace stasis::cli
