#include <sys/utsname.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/phases.h"
#include "criu/criu_pages.h"
#include "direct/gpu_memory.h"
#include "image/image_reader.h"
#include "operations/image_report.h"
#include "operations/machine_checks.h"
#include "operations/operations.h"
#include "operations/restore_checks.h"

namespace stasis {
namespace {

MachineFacts probe_here(const Driver* driver, const Result<Criu>& criu) {
  MachineFacts out;
  utsname name = {};
  if (::uname(&name) == 0) {
    out.hostname = name.nodename;
    out.kernel_release = name.release;
  }
  if (criu) out.criu_version = criu->version_text();
  if (driver != nullptr) {
    out.driver_version = driver->info().driver_version;
    out.cuda_version = driver->info().cuda_version;
    out.simulated = driver->info().simulated;
  }
  return out;
}

std::vector<ImagePart> parts_of(const ImageReader& image,
                                const std::optional<ContentReport>& content,
                                const std::optional<ContentReport>& host) {
  const std::map<std::string, Pid> owners = pages_owners(image.criu_dir(), image.manifest());
  std::map<std::string, std::uint64_t> parts;
  for (const FileRecord& file : image.manifest().files) {
    const std::string name = file.path.substr(file.path.find('/') + 1);
    const auto owner = owners.find(name);
    std::string what = "all else";
    if (owner != owners.end()) {
      what = owner->second.value == 0 ? "shared memory"
                                      : fmt::format("memory of process {}", owner->second.value);
    } else if (name.starts_with("pages-")) {
      what = "memory, not known whose";
    } else if (name.starts_with("ghost-file")) {
      what = "deleted files that are open";
    }
    parts[what] += file.size;
  }
  if (image.manifest().content) {
    // What is stored for several processes counts with the first; the index and what lies between
    // the chunks belongs to no process.
    std::uint64_t left = image.manifest().content->total_bytes();
    for (std::size_t i = 0; content && i < content->processes.size(); ++i) {
      const auto& [pid, use] = content->processes[i];
      const std::string what = fmt::format("GPU content of process {}", pid.value);
      const std::uint64_t bytes = std::min(left, use.stored_bytes);
      parts.try_emplace(what, bytes);
      left -= bytes;
    }
    if (content && content->unused_bytes > 0) {
      const std::string what = "earlier GPU content, of no use any more";
      const std::uint64_t bytes = std::min(left, content->unused_bytes);
      parts.try_emplace(what, bytes);
      left -= bytes;
    }
    parts[content ? "all else" : "GPU content"] += left;
  }
  if (image.manifest().host_content) {
    std::uint64_t left = image.manifest().host_content->total_bytes();
    for (std::size_t i = 0; host && i < host->processes.size(); ++i) {
      const auto& [pid, use] = host->processes[i];
      const std::uint64_t bytes = std::min(left, use.stored_bytes);
      parts[fmt::format("memory of process {}", pid.value)] += bytes;
      left -= bytes;
    }
    parts[host ? "all else" : "memory, not known whose"] += left;
  }
  std::vector<ImagePart> out;
  for (const auto& [what, bytes] : parts)
    out.push_back({what, bytes});
  std::stable_sort(out.begin(), out.end(),
                   [](const ImagePart& a, const ImagePart& b) { return a.bytes > b.bytes; });
  return out;
}

}  // namespace

Result<ImageReport> inspect(const Environment* env, const Error& no_driver,
                            const InspectOptions& options, Progress& progress,
                            const Interrupt& interrupt) {
  Phases phases;
  phases.begin("look");
  STASIS_TRY_ASSIGN(auto image, ImageReader::open(options.images_dir));
  ImageReport out;
  out.path = image.path();
  out.manifest = image.manifest();
  out.content = report_content(image, ContentKind::kGpu);
  out.host_content = report_content(image, ContentKind::kHost);
  out.parts = parts_of(image, out.content, out.host_content);
  const auto enter = [&out](std::string_view id, Result<void> result) {
    out.checks.push_back({id, result ? std::optional<Error>() : std::move(result.error())});
  };
  phases.begin("check");
  // In the order of restore(), so that the first reason is the one that it would give.
  if (env == nullptr) enter("driver", fail(no_driver));
  const auto criu = Criu::find(options.criu_path);
  out.here = probe_here(env == nullptr ? nullptr : &env->driver, criu);
  enter("criu", criu ? Result<void>() : fail(criu.error()));
  if (env != nullptr) {
    const auto old_gpus = gpus_of(out.manifest);
    if (!old_gpus) enter("gpus", fail(old_gpus.error()));
    auto same = check_driver(env->driver, out.manifest);
    const bool known = same.has_value();
    enter("driver", std::move(same));
    RestoreOptions restore;
    restore.gpu_map = options.gpu_map;
    if (old_gpus && known) {
      const auto pairs = plan_gpus(*env, out.manifest, *old_gpus, restore);
      enter("gpus", pairs ? Result<void>() : fail(pairs.error()));
    }
  }
  const std::uint64_t elsewhere = out.content ? out.content->all.bytes : 0;
  const MachineCheckInput input{
      .image = image,
      .progress = progress,
      .interrupt = interrupt,
      .elsewhere = elsewhere,
      .in_our_cgroup = out.manifest.criu_options.cgroups == CgroupMode::kIgnore,
      .ours = env ? std::min(elsewhere, mover_memory(*env, {}, elsewhere)) : 0,
      .tcp_close = out.manifest.criu_options.tcp_close,
      .addresses = {}};
  for (const MachineCheck& each : kMachineChecks)
    enter(each.id, each.check(input));
  out.used_up = files_used_up(image);
  phases.begin("verify");
  auto content =
      image.verify(progress, interrupt,
                   options.verify ? ImageReader::Part::kAll : ImageReader::Part::kAllButPages);
  if (!content && content.error().code == ErrorCode::kInterrupted)
    return fail(std::move(content.error()));
  enter(options.verify ? "checksums" : "files", std::move(content));
  return out;
}

}  // namespace stasis
