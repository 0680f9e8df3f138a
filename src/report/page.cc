// Long because each part of the page turns the same report into its rows.
#include "report/page.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <kainjow/mustache.hpp>

#include "base/printable.h"
#include "base/units.h"
#include "base/version.h"
#include "criu/criu.h"
#include "operations/image_report.h"
#include "page_files.h"
#include "report/drawings.h"

namespace stasis::report {
namespace {

using kainjow::mustache::list;

// Of a list of anything; an image may have a million. `stasis inspect --json` shows all.
constexpr std::size_t kMostRows = 500;
constexpr std::size_t kMostLogs = 10;
// Levels of lists within lists: browsers stop at 512 elements, and paper is not that wide.
constexpr std::size_t kDeepest = 12;
constexpr std::size_t kLongName = 300;
constexpr std::size_t kLongCommand = 1000;
constexpr std::size_t kLongText = 2000;

std::string plural(std::size_t count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

// "12,345,678"
std::string grouped(std::uint64_t value) {
  std::string out = std::to_string(value);
  for (std::size_t at = out.size(); at > 3;) {
    at -= 3;
    out.insert(at, ",");
  }
  return out;
}

// "2026-11-21 09:30:00 UTC"; anything else as it is.
std::string moment(std::string_view text) {
  std::string out = shortened(text, 40);
  if (out.size() != 20 || out[10] != 'T' || out[19] != 'Z') return out;
  return out.substr(0, 10) + " " + out.substr(11, 8) + " UTC";
}

std::string cuda_text(int version) {
  return version == 0 ? "none" : fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string or_none(std::string_view text) {
  return text.empty() ? "none" : shortened(text, kLongName);
}

std::string command_text(const ProcessRecord& process) {
  std::string out;
  for (const std::string& word : process.command) {
    if (out.size() > 4 * kLongText) break;
    out += (out.empty() ? "" : " ") + word;
  }
  return out;
}

// "and 12 more; `stasis inspect --json` shows all", if there are.
void set_more(data& page, const std::string& name, std::size_t all, std::size_t shown) {
  page.set("has_more_" + name, all > shown);
  page.set("more_" + name, fmt::format("… and {} more; `stasis inspect --json` shows all.",
                                       all - std::min(all, shown)));
}

// ---- Whether it can be restored

std::string capitalized(std::string_view text) {
  std::string out(text);
  out.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(out.front())));
  return out;
}

std::string check_label(std::string_view id) {
  for (const RestoreCheckInfo& info : kRestoreChecks)
    if (id == info.id) return capitalized(info.meaning);
  return std::string(id);
}

void set_checks(data& page, const ImageReport& image, bool verified) {
  list checks;
  std::size_t failed = 0;
  for (const RestoreCheck& check : image.checks) {
    failed += check.error ? 1 : 0;
    data row;
    row.set("id", std::string(check.id));
    row.set("label", check_label(check.id));
    row.set("class", check.error ? "bad" : "good");
    row.set("mark", check.error ? "✗" : "✓");
    row.set("state", check.error ? "in the way" : "fine");
    list errors;
    if (check.error) {
      data error;
      error.set("message", shortened(check.error->to_string(), kLongText));
      error.set("code", std::string(error_code_name(check.error->code)));
      error.set("has_remedy", !check.error->remedy.empty());
      error.set("remedy", shortened(check.error->remedy, kLongText));
      errors.push_back(error);
    }
    row.set("error", data(errors));
    checks.push_back(row);
  }
  page.set("checks", data(checks));
  page.set("verdict_class", failed == 0 ? "good" : "bad");
  page.set("verdict_mark", failed == 0 ? "✓" : "✗");
  page.set("verdict",
           failed == 0 ? "Can be restored on this machine" : "Cannot be restored here, now");
  std::string more =
      failed > 0 ? fmt::format("{} of {} stand in the way; what to do stands beside each.", failed,
                               plural(image.checks.size(), "check", "checks"))
      : verified ? "Nothing known stands in the way, now. Every byte was read and compared."
                 : "Nothing known stands in the way, now. The memory pages were not read; "
                   "with --verify they are.";
  if (is_for_a_job(image.manifest)) {
    more +=
        " It has what was in the /dev/shm of a job, which goes on from it by its folder, and not "
        "from "
        "the image alone.";
  }
  page.set("verdict_more", more);
}

// ---- Time and size

// How long the processes stood still until CRIU had them in its files: from when the gate closed
// for the last time, or the driver's lock. What a dump that lets them go on adds to it comes after
// the image. Nothing if the phases do not say.
std::optional<double> downtime(const std::vector<TimedPhase>& phases) {
  const auto named = [](std::string_view name) {
    return [name](const TimedPhase& phase) { return phase.name == name; };
  };
  const auto closed = std::find_if(phases.rbegin(), phases.rend(), named("close"));
  const auto from = closed != phases.rend()
                        ? std::prev(closed.base())
                        : std::find_if(phases.begin(), phases.end(), named("lock"));
  const auto criu = std::find_if(phases.rbegin(), phases.rend(), named("criu"));
  if (from == phases.end() || criu == phases.rend() || from >= criu.base()) return std::nullopt;
  return criu->start + criu->seconds - from->start;
}

void set_restore(data& page, const ImageReport& image) {
  const Manifest& manifest = image.manifest;
  std::string command = "stasis restore --detach " + shell_word(image.path);
  std::string lead = "To bring it back, in a shell on the machine that has the image:";
  if (is_for_a_job(manifest) && manifest.job) {
    command = line_of_job(manifest, image.path);
    lead = "It is of a job. If it is the newest of its folder, this goes on from it:";
  }
  page.set("restore_lead", lead);
  page.set("restore_command", shortened(command, kLongText));
}

void set_time(data& page, const Manifest& manifest) {
  const std::vector<TimedPhase> phases = timed_phases(manifest.phases, manifest.beside);
  const double total = total_time(phases);
  list rows;
  for (const TimedPhase& phase : phases) {
    data row;
    row.set("name", phase.name);
    row.set("start", format_seconds(Seconds(phase.start)));
    row.set("duration", format_seconds(Seconds(phase.seconds)));
    row.set("share", percent_text(phase.seconds, total));
    row.set("meaning", meaning_of(phase));
    rows.push_back(row);
  }
  page.set("has_phases", !phases.empty());
  page.set("phases", data(rows));
  page.set("phases_total", format_seconds(Seconds(total)));
  page.set("timeline", draw_timeline(phases));
  const auto longest =
      std::max_element(phases.begin(), phases.end(), [](const TimedPhase& a, const TimedPhase& b) {
        return (a.beside ? 0 : a.seconds) < (b.beside ? 0 : b.seconds);
      });
  page.set("time_lead", longest == phases.end()
                            ? std::string()
                            : fmt::format("{} in {}; the longest, “{}”, took {} of it.",
                                          format_seconds(Seconds(total)),
                                          plural(manifest.phases.size(), "phase", "phases"),
                                          longest->name, percent_text(longest->seconds, total)));
}

void set_size(data& page, const ImageReport& image) {
  const Manifest& manifest = image.manifest;
  const auto total = static_cast<double>(manifest.total_bytes);
  list rows;
  for (const ImagePart& part : image.parts) {
    if (rows.size() == kMostRows) break;
    data row;
    row.set("name", shortened(part.what, kLongName));
    row.set("size", format_bytes(part.bytes));
    row.set("bytes", grouped(part.bytes));
    row.set("share", percent_text(static_cast<double>(part.bytes), total));
    row.set("bar", percent(total > 0 ? static_cast<double>(part.bytes) / total : 0));
    rows.push_back(row);
  }
  set_more(page, "parts", image.parts.size(), rows.size());
  page.set("parts", data(rows));
  page.set("size_total", format_bytes(manifest.total_bytes));
  page.set("bytes_total", grouped(manifest.total_bytes));
  page.set("size_lead",
           fmt::format("{} in {}{}.", format_bytes(manifest.total_bytes),
                       plural(manifest.file_count(), "file", "files"),
                       manifest.sync == SyncPolicy::kDisk
                           ? ""
                           : ", not synced to the disk when the dump ended (--sync none)"));
}

std::uint64_t on_gpus(const Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const ProcessRecord& process : manifest.processes)
    bytes += gpu_bytes(process);
  return bytes;
}

// In CRIU's files and beside them.
std::uint64_t host_bytes(const ImageReport& image) {
  std::uint64_t bytes = 0;
  for (const ImagePart& part : image.parts) {
    if (part.what.starts_with("memory of process ") || part.what == "shared memory")
      bytes += part.bytes;
  }
  return bytes;
}

data memory_row(const std::string& what, const std::string& where, const ContentUse* use,
                std::uint64_t bytes) {
  const auto text = [&](std::uint64_t ContentUse::*part) {
    return use == nullptr ? std::string() : format_bytes(use->*part);
  };
  data row;
  row.set("what", what);
  row.set("where", where);
  row.set("bytes", format_bytes(use == nullptr ? bytes : use->bytes));
  row.set("stored", text(&ContentUse::stored_bytes));
  row.set("zeros", text(&ContentUse::zero_bytes));
  row.set("repetitions", text(&ContentUse::duplicate_bytes));
  row.set("reused", text(&ContentUse::reused_bytes));
  return row;
}

void set_memory(data& page, const ImageReport& image) {
  list rows;
  std::uint64_t by_driver = on_gpus(image.manifest);
  if (image.content) {
    rows.push_back(memory_row("GPU memory", "files of its own, copied past the driver",
                              &image.content->all, 0));
    by_driver -= std::min(by_driver, image.content->all.bytes);
  }
  if (by_driver > 0 || !image.content) {
    rows.push_back(memory_row(image.content ? "GPU memory, the rest" : "GPU memory",
                              "in the memory of its process, where the driver put it, contexts too",
                              nullptr, by_driver));
  }
  if (image.host_content) {
    rows.push_back(memory_row("Host memory, large", "files of its own, written by all processors",
                              &image.host_content->all, 0));
  }
  rows.push_back(memory_row("Host memory", "CRIU’s files", nullptr, host_bytes(image)));
  page.set("memory", data(rows));
}

// ---- Processes and GPUs

data badge(std::string_view kind, const std::string& text) {
  data out;
  out.set("class", std::string(kind));
  out.set("text", text);
  return out;
}

data process_row(const ProcessRecord& process, std::uint64_t host, bool too_deep) {
  const std::string command = command_text(process);
  const std::uint64_t bytes = gpu_bytes(process);
  const std::string state =
      process.cuda_state ? std::string(cuda_state_name(*process.cuda_state)) : "";
  std::string ports;
  for (const std::uint16_t port : process.tcp_ports) {
    if (ports.size() > kLongName) {
      ports += ", …";
      break;
    }
    ports += fmt::format("{}{}", ports.empty() ? "" : ", ", port);
  }
  list badges;
  if (too_deep) badges.push_back(badge("", fmt::format("child of {}", process.parent.value)));
  if (process.cuda) badges.push_back(badge("cuda", "CUDA, " + state));
  if (bytes > 0) badges.push_back(badge("cuda", format_bytes(bytes) + " on the GPU"));
  if (!process.threads.empty())
    badges.push_back(badge("", plural(process.threads.size() + 1, "thread", "threads")));
  if (!ports.empty()) badges.push_back(badge("", "TCP " + ports));
  data row;
  row.set("pid", std::to_string(process.pid.value));
  row.set("parent", process.parent.value == 0 ? "–" : std::to_string(process.parent.value));
  row.set("command", command.empty() ? "(no command line)" : shortened(command, 160));
  row.set("full_command", shortened(command, kLongCommand));
  row.set("cuda", process.cuda ? state : "no");
  row.set("gpu_memory", bytes > 0 ? format_bytes(bytes) : process.cuda ? "unknown" : "–");
  row.set("host_memory", host > 0 ? format_bytes(host) : "–");
  row.set("threads", process.threads.empty() ? "–" : std::to_string(process.threads.size() + 1));
  row.set("ports", ports.empty() ? "–" : ports);
  row.set("badges", data(badges));
  return row;
}

void set_processes(data& page, const ImageReport& image) {
  const Manifest& manifest = image.manifest;
  // Once for all: there may be a million parts.
  std::map<std::string_view, std::uint64_t> host;
  for (const ImagePart& part : image.parts)
    host[part.what] += part.bytes;
  const std::vector<TreeLine> lines = tree_lines(manifest, kMostRows);
  const auto depth_at = [&](std::size_t i) {
    return i < lines.size() ? std::min(lines[i].depth, kDeepest) : 0;
  };
  list rows;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const ProcessRecord& process = *lines[i].process;
    const auto its = host.find(fmt::format("memory of process {}", process.pid.value));
    data row = process_row(process, its == host.end() ? 0 : its->second, lines[i].depth > kDeepest);
    // The list of its children begins, or its own item ends, with those that it was the last of.
    const std::size_t depth = depth_at(i);
    const std::size_t next = depth_at(i + 1);
    const bool opens = next > depth;
    row.set("opens", opens);
    row.set("closes_item", !opens);
    row.set("closes", data(list(opens ? 0 : depth - next, data(true))));
    rows.push_back(row);
  }
  set_more(page, "processes", manifest.processes.size(), rows.size());
  page.set("tree", data(rows));
  const auto cuda = static_cast<std::size_t>(
      std::count_if(manifest.processes.begin(), manifest.processes.end(),
                    [](const ProcessRecord& process) { return process.cuda; }));
  page.set("processes_lead",
           fmt::format("{}, {} with CUDA. A restore brings each back with the number it had.",
                       plural(manifest.processes.size(), "process", "processes"), cuda));
}

void set_gpus(data& page, const Manifest& manifest) {
  std::map<std::string_view, std::uint64_t> used;
  for (const ProcessRecord& process : manifest.processes)
    for (const GpuMemoryRecord& use : process.gpu_memory)
      used[use.gpu_uuid] += use.bytes;
  list rows;
  for (const GpuRecord& gpu : manifest.gpus) {
    if (rows.size() == kMostRows) break;
    data row;
    row.set("index", std::to_string(rows.size()));
    row.set("name", shortened(gpu.name, kLongName));
    row.set("memory", format_bytes(gpu.total_memory));
    row.set("used", used.contains(gpu.uuid) ? format_bytes(used[gpu.uuid]) : "–");
    row.set("pci", shortened(gpu.pci_bus_id, kLongName));
    row.set("uuid", shortened(gpu.uuid, kLongName));
    rows.push_back(row);
  }
  set_more(page, "gpus", manifest.gpus.size(), rows.size());
  page.set("has_gpus", !manifest.gpus.empty());
  page.set("gpus", data(rows));
}

// ---- The rest

void set_machines(data& page, const ImageReport& image) {
  const Manifest& there = image.manifest;
  const MachineFacts& here = image.here;
  const auto driver = [](const std::string& version, bool simulated) {
    return simulated && version.find("simulated") == std::string::npos
               ? or_none(version) + " (simulated GPU)"
               : or_none(version);
  };
  const std::array<std::array<std::string, 3>, 6> facts = {
      {{"Host", or_none(there.hostname), or_none(here.hostname)},
       {"Kernel", or_none(there.kernel_release), or_none(here.kernel_release)},
       {"Stasis", or_none(there.stasis_version), kVersion},
       {"CRIU", criu_version_text(there.criu_version), or_none(here.criu_version)},
       {"GPU driver", driver(there.driver_version, there.simulated),
        driver(here.driver_version, here.simulated)},
       {"CUDA", cuda_text(there.cuda_version), cuda_text(here.cuda_version)}}};
  list rows;
  for (const auto& [what, then, now] : facts) {
    data row;
    row.set("what", what);
    row.set("there", then);
    row.set("here", now);
    row.set("differs", then != now);
    rows.push_back(row);
  }
  page.set("machines", data(rows));
  page.set("here_host", or_none(here.hostname));
}

void set_options(data& page, const CriuOptions& criu) {
  const std::vector<std::string> words = options_used(criu);
  list rows;
  for (const std::string& word : words)
    if (rows.size() < kMostRows) rows.push_back(data(shortened(word, kLongText)));
  set_more(page, "options", words.size(), rows.size());
  page.set("options", data(rows));
}

data log_row(const ShownLog& shown) {
  data row;
  row.set("name", shortened(shown.log.name, kLongName));
  row.set("folder", shortened(shown.log.folder, kLongText));
  row.set("changed", moment(utc_text(shown.log.changed)));
  row.set("size", format_bytes(shown.log.bytes));
  list errors;
  list diagnoses;
  std::string note;
  if (!shown.content) {
    note = "It cannot be read: " + shortened(shown.content.error().to_string(), kLongText);
  } else {
    for (const std::string& line : shown.content->errors)
      errors.push_back(data(shortened(line, kLongText)));
    if (const auto& diagnosis = shown.content->diagnosis) {
      data one;
      one.set("code", std::string(error_code_name(diagnosis->code)));
      one.set("meaning", shortened(diagnosis->meaning, kLongText));
      one.set("remedy", shortened(diagnosis->remedy, kLongText));
      diagnoses.push_back(one);
    } else if (errors.empty()) {
      note = "No errors.";
    }
    if (shown.content->truncated)
      note += note.empty() ? "Only its end was read." : " Only its end was read.";
  }
  row.set("has_note", !note.empty());
  row.set("note", note);
  row.set("has_errors", !errors.empty());
  row.set("errors", data(errors));
  row.set("diagnosis", data(diagnoses));
  return row;
}

void set_logs(data& page, const Subject& subject) {
  list rows;
  for (const ShownLog& log : subject.logs)
    if (rows.size() < kMostLogs) rows.push_back(log_row(log));
  page.set("logs", data(rows));
  page.set("logs_lead", subject.no_logs ? "The logs cannot be looked for: " +
                                              shortened(subject.no_logs->to_string(), kLongText)
                        : rows.empty() ? "There are no logs in or beside the image."
                        : rows.size() < subject.logs.size()
                            ? fmt::format("The newest {} of {} logs; `stasis logs` shows all.",
                                          rows.size(), subject.logs.size())
                            : "The logs in and beside the image, the newest first.");
}

data fact(std::string_view what, const std::string& figure, const std::string& more) {
  data out;
  out.set("what", std::string(what));
  out.set("figure", figure);
  out.set("more", more);
  return out;
}

void set_facts(data& page, const ImageReport& image) {
  const Manifest& manifest = image.manifest;
  const std::vector<TimedPhase> phases = timed_phases(manifest.phases, {});
  const std::uint64_t gpu = on_gpus(manifest);
  std::size_t cuda = 0;
  for (const ProcessRecord& process : manifest.processes)
    cuda += process.cuda ? 1 : 0;
  list facts;
  const auto still = downtime(phases);
  facts.push_back(still ? fact("Downtime until saved", format_seconds(Seconds(*still)),
                               "then the image was completed: the dump's line says how long in all")
                        : fact("Downtime until saved", "–", "no times recorded"));
  facts.push_back(fact("Size", format_bytes(manifest.total_bytes),
                       "in " + plural(manifest.file_count(), "file", "files")));
  facts.push_back(manifest.phases.empty()
                      ? fact("Dump", "–", "no times recorded")
                      : fact("Dump", format_seconds(Seconds(total_time(phases))),
                             "in " + plural(manifest.phases.size(), "phase", "phases")));
  facts.push_back(fact("Processes", std::to_string(manifest.processes.size()),
                       fmt::format("{} with CUDA", cuda)));
  facts.push_back(fact("GPU memory", gpu > 0 ? format_bytes(gpu) : "–",
                       gpu > 0 ? "held before the dump" : "not recorded"));
  const std::uint64_t host = host_bytes(image);
  facts.push_back(fact("Host memory", host > 0 ? format_bytes(host) : "–",
                       image.content ? "in the image, without the GPU’s"
                                     : "in the image, with what the driver put there"));
  facts.push_back(fact("GPUs", std::to_string(manifest.gpus.size()),
                       manifest.gpus.empty() ? "" : shortened(manifest.gpus.front().name, 40)));
  const std::string made = moment(manifest.created);
  facts.push_back(
      fact("Made", made.substr(0, made.find(' ')),
           fmt::format("{} on {}",
                       made.find(' ') == std::string::npos ? "" : made.substr(made.find(' ') + 1),
                       shortened(manifest.hostname, 60))));
  page.set("facts", data(facts));
}

}  // namespace

std::string render_page(const Subject& subject) {
  const ImageReport& image = subject.image;
  data page;
  page.set("css", kPageCss);
  page.set("nonce", subject.nonce);
  page.set("own_version", kVersion);
  page.set("made", moment(subject.made));
  const std::string name = image.path.substr(image.path.rfind('/') + 1);
  page.set("name", shortened(name.empty() ? image.path : name, kLongName));
  page.set("path", shortened(image.path, kLongText));
  page.set("simulated", image.manifest.simulated);
  page.set("root_pid", std::to_string(image.manifest.root.value));
  page.set("root_command", "");
  for (const ProcessRecord& process : image.manifest.processes)
    if (process.pid == image.manifest.root)
      page.set("root_command", shortened(command_text(process), 200));
  set_restore(page, image);
  set_facts(page, image);
  set_checks(page, image, subject.verified);
  set_time(page, image.manifest);
  set_size(page, image);
  set_memory(page, image);
  set_processes(page, image);
  set_gpus(page, image.manifest);
  set_machines(page, image);
  set_options(page, image.manifest.criu_options);
  set_logs(page, subject);
  return kainjow::mustache::mustache(kPageHtml).render(page);
}

}  // namespace stasis::report
