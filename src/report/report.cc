#include "report/report.h"

#include <algorithm>

#include <fmt/format.h>

#include "operations/image_report.h"

namespace stasis {

using nlohmann::json;

namespace {

// Where there is nothing, null says so.
json or_null(const std::string& text) { return text.empty() ? json() : json(text); }

}  // namespace

json to_json(const ProcessReport& process) {
  json out = {{"pid", process.pid.value},
              {"command", process.comm},
              {"cuda", process.cuda},
              {"state", nullptr},
              {"gpu_bytes", nullptr}};
  if (process.cuda) {
    out["state"] = std::string(process.state ? cuda_state_name(*process.state) : "ended");
    if (process.gpu_bytes > 0) out["gpu_bytes"] = process.gpu_bytes;
  }
  return out;
}

std::string size_text(const DumpReport& report) {
  std::string text = format_bytes(report.image_bytes);
  if (report.reused_bytes > 0)
    text += fmt::format(", {} of it written", format_bytes(report.written_bytes));
  if (report.precopied_bytes > 0)
    text += fmt::format(", {} while it ran", format_bytes(report.precopied_bytes));
  return text;
}

std::string subject_text(Pid root, const std::vector<ProcessReport>& processes) {
  std::size_t cuda = 0;
  for (const ProcessReport& process : processes)
    cuda += process.cuda ? 1 : 0;
  if (processes.size() <= 1) return fmt::format("process {}", root.value);
  return fmt::format("process {} and what is below it ({} processes, {} with CUDA)", root.value,
                     processes.size(), cuda);
}

std::string subject_text(const Report& report) {
  return subject_text(report.root, report.processes);
}

const char* path_name(const Report& report) {
  if (!report.was_so) return report.direct_bytes > 0 ? "direct" : "driver";
  if (!report.moved_before) return nullptr;
  return *report.moved_before == MemoryPath::kDirect ? "direct" : "driver";
}

json to_json(const Report& report) {
  const char* path = path_name(report);
  json processes = json::array();
  for (const ProcessReport& process : report.processes)
    processes.push_back(to_json(process));
  json phases = json::array();
  for (const PhaseRecord& phase : report.phases) {
    phases.push_back({{"name", phase.name}, {"seconds", phase.seconds}});
  }
  json out = {{"ok", true},
              {"pid", report.root.value},
              {"path", path != nullptr ? json(path) : json()},
              {"processes", processes},
              {"phases", phases},
              {"lost", report.lost},
              {"seconds", report.total.count()},
              {"standstill_seconds", report.downtime ? json(report.downtime->count()) : json()},
              {"lock_tries", report.lock_tries > 0 ? json(report.lock_tries) : json()},
              {"direct_bytes", report.direct_bytes},
              {"was_so", report.was_so}};
  return out;
}

json to_json(const AttachReport& report) {
  json out = to_json(static_cast<const Report&>(report));
  json attached = json::array();
  for (const AttachedProcess& one : report.attached) {
    json left = json::array();
    for (const AttachedProcess::Left& part : one.left)
      left.push_back({{"why", part.why}, {"count", part.count}, {"bytes", part.bytes}});
    attached.push_back({{"pid", one.pid.value},
                        {"command", one.comm},
                        {"was_so", one.was_so},
                        {"converted_count", one.converted_count},
                        {"converted_bytes", one.converted_bytes},
                        {"left", left}});
  }
  out["attached"] = attached;
  return out;
}

json to_json(const DumpReport& report) {
  json out = to_json(static_cast<const Report&>(report));
  out["images_dir"] = report.images_dir;
  out["image_bytes"] = report.image_bytes;
  out["written_bytes"] = report.written_bytes;
  out["taken_bytes"] = report.reused_bytes;
  out["precopied_bytes"] = report.precopied_bytes;
  out["direct_io"] = report.direct_io;
  out["dropped_zero_bytes"] = report.dropped_zero_bytes;
  return out;
}

json to_json(const RestoreReport& report) {
  json out = to_json(static_cast<const Report&>(report));
  out["images_dir"] = report.images_dir;
  out["image_bytes"] = report.image_bytes;
  return out;
}

json to_json(const RecoverReport& report) {
  json processes = json::array();
  for (const ProcessReport& process : report.processes) {
    processes.push_back(to_json(process));
  }
  return {{"pid", report.root.value},
          {"operation", or_null(report.operation.name())},
          {"was_so", report.was_so},
          {"images_dir", or_null(report.image)},
          {"processes", processes},
          {"finished", report.finished},
          {"image_kept", report.image_kept},
          {"outcome", or_null(report.outcome)},
          {"error", report.error ? to_json(*report.error)["error"] : json()}};
}

json to_json(const std::vector<RecoverReport>& reports) {
  json recovered = json::array();
  bool ok = true;
  for (const RecoverReport& report : reports) {
    recovered.push_back(to_json(report));
    ok = ok && !report.error;
  }
  return {{"ok", ok}, {"recovered", recovered}};
}

json to_json(const CriuDiagnosis& diagnosis) {
  return {{"code", error_code_name(diagnosis.code)},
          {"line", diagnosis.line},
          {"meaning", diagnosis.meaning},
          {"remedy", diagnosis.remedy}};
}

json to_json(const Error& error) {
  json out = {{"code", std::string(error_code_name(error.code))},
              {"message", error.to_string()},
              {"remedy", error.remedy},
              {"exit_status", exit_status(error.code)},
              {"driver", nullptr},
              {"obstacles", json::array()}};
  if (error.driver) {
    out["driver"] = {{"number", error.driver->number},
                     {"name", error.driver->name},
                     {"text", error.driver->text}};
  }
  for (const Obstacle& obstacle : error.obstacles) {
    const auto option = option_of(obstacle.by);
    out["obstacles"].push_back({{"id", obstacle.id.name()},
                                {"pid", obstacle.pid.value},
                                {"what", obstacle.what},
                                {"remedy", obstacle.remedy},
                                {"override", option.empty() ? json() : json(option)}});
  }
  return {{"ok", false}, {"error", out}};
}

std::string json_text(const json& object) {
  return object.dump(2, ' ', true, json::error_handler_t::replace);
}

json to_json(const MachineFacts& here) {
  return {{"hostname", or_null(here.hostname)},
          {"kernel_release", or_null(here.kernel_release)},
          {"criu_version", or_null(here.criu_version)},
          {"driver_version", or_null(here.driver_version)},
          {"cuda_version", here.cuda_version > 0 ? json(here.cuda_version) : json()},
          {"simulated", here.simulated}};
}

json to_json(const ContentReport& content) {
  const auto amounts = [](const ContentUse& use) -> json {
    return {{"bytes", use.bytes},
            {"stored_bytes", use.stored_bytes},
            {"zero_bytes", use.zero_bytes},
            {"duplicate_bytes", use.duplicate_bytes},
            {"taken_bytes", use.reused_bytes}};
  };
  json out = amounts(content.all);
  out["chunk_bytes"] = content.chunk_bytes;
  out["unused_bytes"] = content.unused_bytes;
  out["processes"] = json::array();
  for (const auto& [pid, use] : content.processes) {
    out["processes"].push_back(amounts(use));
    out["processes"].back()["pid"] = pid.value;
  }
  return out;
}

json to_json(const VerifyReport& report) {
  return {{"ok", true},
          {"images_dir", report.path},
          {"image_bytes", report.bytes},
          {"files", report.files},
          {"seconds", report.seconds},
          {"gpu_content", report.content ? to_json(*report.content) : json()},
          {"host_content", report.host_content ? to_json(*report.host_content) : json()}};
}

namespace {

json process_json(const ProcessRecord& process) {
  json out = {{"pid", process.pid.value},
              {"parent", process.parent.value},
              {"command", process.command},
              {"cuda", process.cuda},
              {"threads", process.threads.empty() ? json() : json(process.threads.size() + 1)},
              {"tcp_ports", process.tcp_ports},
              {"state", nullptr},
              {"gpu_memory", json::array()}};
  if (!process.cuda) return out;
  out["state"] = cuda_state_name(*process.cuda_state);
  for (const GpuMemoryRecord& use : process.gpu_memory)
    out["gpu_memory"].push_back({{"uuid", use.gpu_uuid}, {"bytes", use.bytes}});
  return out;
}

json checks_json(const std::vector<RestoreCheck>& checks) {
  json out = json::array();
  for (const RestoreCheck& check : checks) {
    out.push_back({{"id", check.id},
                   {"ok", !check.error},
                   {"error", check.error ? to_json(*check.error)["error"] : json()}});
  }
  return out;
}

}  // namespace

json to_json(const ImageReport& report) {
  const Manifest& m = report.manifest;
  json processes = json::array();
  for (const ProcessRecord& process : m.processes)
    processes.push_back(process_json(process));
  json gpus = json::array();
  for (const GpuRecord& gpu : m.gpus)
    gpus.push_back({{"uuid", gpu.uuid},
                    {"name", gpu.name},
                    {"pci_bus_id", gpu.pci_bus_id},
                    {"total_memory", gpu.total_memory}});
  json sizes = json::array();
  for (const ImagePart& part : report.parts)
    sizes.push_back({{"what", part.what}, {"bytes", part.bytes}});
  json phases = json::array();
  for (const PhaseRecord& phase : m.phases)
    phases.push_back({{"name", phase.name}, {"seconds", phase.seconds}});
  json beside = json::array();
  for (const PhaseRecord& work : m.beside)
    beside.push_back({{"name", work.name},
                      {"begins_seconds", work.begins.value_or(0)},
                      {"seconds", work.seconds}});
  return {{"ok", true},
          {"images_dir", report.path},
          {"image_bytes", m.total_bytes},
          {"files", m.file_count()},
          {"created", m.created},
          {"hostname", m.hostname},
          {"stasis_version", m.stasis_version},
          {"kernel_release", m.kernel_release},
          {"criu_version", criu_version_text(m.criu_version)},
          {"driver_version", or_null(m.driver_version)},
          {"cuda_version", m.cuda_version},
          {"simulated", m.simulated},
          {"sync", m.sync == SyncPolicy::kDisk ? "disk" : "none"},
          {"pid", m.root.value},
          {"name", or_null(m.job_name)},
          {"group",
           m.group ? json{{"id", m.group->id}, {"parts", m.group->parts}, {"part", m.group->name}}
                   : json()},
          {"processes", processes},
          {"gpus", gpus},
          {"sizes", sizes},
          {"gpu_content", report.content ? to_json(*report.content) : json()},
          {"host_content", report.host_content ? to_json(*report.host_content) : json()},
          {"phases", phases},
          {"options", options_used(m.criu_options)},
          {"lost", m.sockets ? m.sockets->lost : std::vector<std::string>()},
          {"here", to_json(report.here)},
          {"restorable", restorable(report)},
          {"used_up", report.used_up},
          {"beside", beside},
          {"needs_stasis_run", is_for_a_job(m)},
          {"checks", checks_json(report.checks)}};
}

}  // namespace stasis
