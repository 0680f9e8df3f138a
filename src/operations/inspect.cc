#include <linux/capability.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "criu/criu_pages.h"
#include "image/image_reader.h"
#include "operations/common.h"
#include "operations/restore_checks.h"

namespace stasis {
namespace {

// What CRIU asks for first, whoever runs it.
Result<void> check_rights() {
  const auto capabilities = proc::ProcFs().effective_capabilities();
  const auto has = [&](unsigned which) { return (*capabilities >> which & 1) != 0; };
  if (!capabilities || has(CAP_CHECKPOINT_RESTORE) || has(CAP_SYS_ADMIN)) return {};
  return fail(ErrorCode::kNotPermitted, "this user may not restore processes",
              "run as root, or with CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE and CAP_SETPCAP");
}

// Somebody listens where the job did. An image with a network of its own brings its ports along.
Result<void> check_ports(const Manifest& manifest) {
  const auto of_network = [](const FileRecord& file) {
    return file.path.starts_with("criu/netdev-");
  };
  if (std::any_of(manifest.files.begin(), manifest.files.end(), of_network)) return {};
  std::set<std::uint16_t> taken;
  if (const auto sockets = proc::ProcFs().tcp_sockets(Pid{::getpid()})) {
    for (const proc::TcpSocket& socket : *sockets)
      if (socket.listens) taken.insert(socket.local_port);
  }
  for (const ProcessRecord& process : manifest.processes) {
    for (const std::uint16_t port : process.tcp_ports) {
      if (!taken.contains(port)) continue;
      return fail(
          ErrorCode::kBusy,
          fmt::format("process {} of the image listens on TCP port {}, which is in use here",
                      process.pid.value, port),
          fmt::format("end what listens there (ss -ltnp 'sport = :{}')", port));
    }
  }
  return {};
}

std::vector<ImagePart> parts_of(const ImageReader& image) {
  const std::map<std::string, Pid> owners = pages_owners(image.criu_dir(), image.manifest());
  std::map<std::string, std::uint64_t> sums;
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
    sums[what] += file.size;
  }
  std::vector<ImagePart> out;
  for (const auto& [what, bytes] : sums)
    out.push_back({what, bytes});
  std::stable_sort(out.begin(), out.end(),
                   [](const ImagePart& a, const ImagePart& b) { return a.bytes > b.bytes; });
  return out;
}

}  // namespace

Result<ImageReport> inspect(const Environment* env, const Error& no_driver,
                            const InspectOptions& options, Progress& progress,
                            const Interrupt& interrupt) {
  auto image = ImageReader::open(options.images_dir);
  if (!image) return fail(std::move(image.error()));
  ImageReport out;
  out.path = image->path();
  out.manifest = image->manifest();
  out.parts = parts_of(*image);
  const auto enter = [&out](std::string_view id, Result<void> result) {
    out.checks.push_back({id, result ? std::optional<Error>() : std::move(result.error())});
  };
  // In the order of restore(), so that the first reason is the one that it would give.
  if (env == nullptr) enter("driver", fail(no_driver));
  const auto criu = Criu::find(options.criu_path);
  enter("criu", criu ? Result<void>() : fail(criu.error()));
  if (env != nullptr) {
    const auto old_gpus = gpus_of(out.manifest);
    auto same = check_driver(env->driver, out.manifest);
    const bool known = same.has_value();
    enter("driver", std::move(same));
    RestoreOptions restore;
    restore.gpu_map = options.gpu_map;
    if (!old_gpus) {
      enter("gpus", fail(old_gpus.error()));
    } else if (known) {
      const auto pairs = plan_gpus(*env, out.manifest, *old_gpus, restore);
      enter("gpus", pairs ? Result<void>() : fail(pairs.error()));
    }
  }
  enter("host-memory",
        check_host_memory(out.manifest, out.manifest.criu_options.cgroups == CgroupMode::kIgnore));
  enter("process-numbers", check_numbers(out.manifest));
  enter("tcp-ports", check_ports(out.manifest));
  auto content =
      image->verify(progress, interrupt,
                    options.verify ? ImageReader::Part::kAll : ImageReader::Part::kAllButPages);
  if (!content && content.error().code == ErrorCode::kInterrupted)
    return fail(std::move(content.error()));
  enter(options.verify ? "checksums" : "files", std::move(content));
  enter("permissions", check_rights());
  return out;
}

}  // namespace stasis
