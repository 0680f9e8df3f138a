#include <fcntl.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <thread>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "base/scope_guard.h"
#include "image/image_reader.h"
#include "operations/common.h"

namespace stasis {

using namespace operations;

namespace {

constexpr int kKillWaitMs = 10000;
// CRIU can hang for ever in a restore (criu.md of the project's facts; seen without CAP_SETPCAP).
// It reads pages at several hundred MB/s at least, so this is generous for an image of any size.
constexpr std::chrono::seconds kRestoreDeadlineBase{60};
constexpr std::uint64_t kSlowestBytesPerSecond = 50'000'000;

CudaState wanted_state(const ProcessRecord& record) {
  switch (record.cuda_state.value_or(ImageCudaState::kRunning)) {
    case ImageCudaState::kLocked:
      return CudaState::kLocked;
    case ImageCudaState::kCheckpointed:
      return CudaState::kCheckpointed;
    case ImageCudaState::kRunning:
      break;
  }
  return CudaState::kRunning;
}

Result<std::vector<Gpu>> gpus_of(const Manifest& manifest) {
  std::vector<Gpu> out;
  for (const GpuRecord& record : manifest.gpus) {
    const auto uuid = GpuUuid::parse(record.uuid);
    if (!uuid) return fail(ErrorCode::kImageCorrupt, "the image names a GPU " + record.uuid);
    out.push_back({*uuid, record.name, record.pci_bus_id, record.total_memory, 0});
  }
  return out;
}

// The program has the driver's library mapped, so the very same version must be here.
Result<void> check_driver(const Driver& driver, const Manifest& manifest) {
  const DriverInfo& here = driver.info();
  if (here.simulated != manifest.simulated) {
    return fail(ErrorCode::kGpuMismatch,
                fmt::format("the image was made on a {} GPU and the driver here is {}",
                            manifest.simulated ? "simulated" : "real",
                            here.simulated ? "the simulated one" : "a real one"),
                "restore it with the driver it was made with (STASIS_LIBCUDA)");
  }
  if (here.cuda_version != manifest.cuda_version ||
      (!here.driver_version.empty() && !manifest.driver_version.empty() &&
       here.driver_version != manifest.driver_version)) {
    return fail(ErrorCode::kDriverUnsupported,
                fmt::format("the image was made with driver {} and this machine has {}",
                            manifest.driver_version, here.driver_version),
                "restore it on a machine with the same version of the driver");
  }
  return {};
}

Result<void> check_pids(const Manifest& manifest) {
  const proc::ProcFs procfs;
  for (const ProcessRecord& record : manifest.processes) {
    auto info = procfs.process(record.pid);
    if (!info && info.error().code == ErrorCode::kNoSuchProcess) continue;
    return fail(ErrorCode::kPidInUse,
                info ? fmt::format("the image needs process number {}, which is in use by {}",
                                   record.pid.value, info->comm)
                     : fmt::format("the image needs process number {}, which is in use by a thread",
                                   record.pid.value),
                "is the job still running? end what uses the number, or restore in a PID namespace "
                "of its own: unshare --pid --fork --mount-proc stasis restore ...");
  }
  return {};
}

Result<std::vector<GpuPair>> plan_gpus(const Environment& env, const Manifest& manifest,
                                       const RestoreOptions& options) {
  auto from = gpus_of(manifest);
  if (!from) return fail(std::move(from.error()));
  auto to = env.driver.gpus();
  if (!to) return fail(std::move(to.error()));
  auto pairs = plan_gpu_map(env.driver, options.gpu_map, *from, *to);
  if (!pairs) return fail(std::move(pairs.error()));
  if (options.leave_suspended) return pairs;
  std::vector<GpuUse> needed;
  for (const ProcessRecord& record : manifest.processes) {
    if (!record.cuda || wanted_state(record) == CudaState::kCheckpointed) continue;
    for (const GpuMemoryRecord& use : record.gpu_memory) {
      const auto uuid = GpuUuid::parse(use.gpu_uuid);
      if (!uuid) return fail(ErrorCode::kImageCorrupt, "the image names a GPU " + use.gpu_uuid);
      needed.push_back({*uuid, use.bytes});
    }
  }
  if (auto fits = check_gpu_memory(needed, *pairs, *to); !fits) {
    return fail(std::move(fits.error()));
  }
  return pairs;
}

void kill_tree(const Group& group) {
  // Children first, so that no parent sees them die and starts them anew.
  const auto& members = group.members();
  for (auto it = members.rbegin(); it != members.rend(); ++it) {
    (void)it->process.pidfd().signal(SIGKILL);
  }
  for (const GroupMember& member : members)
    (void)member.process.pidfd().wait_exit(kKillWaitMs);
}

// Restores the GPU state of each process of the image and brings it to the state it had before the
// dump.
Result<void> bring_back(Group& group, const Manifest& manifest, std::span<const GpuPair> pairs) {
  std::vector<Result<void>> results(manifest.processes.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < manifest.processes.size(); ++i) {
      const ProcessRecord& record = manifest.processes[i];
      const CudaState wanted = wanted_state(record);
      if (!record.cuda || wanted == CudaState::kCheckpointed) continue;
      const auto member =
          std::find_if(group.members().begin(), group.members().end(),
                       [&](const GroupMember& m) { return m.process.pid() == record.pid; });
      if (member == group.members().end()) {
        results[i] = fail(ErrorCode::kProcessGone,
                          fmt::format("process {} ended right after the restore", record.pid.value),
                          "see the restore log in the image's log directory");
        continue;
      }
      threads.emplace_back([&, i, wanted, process = &member->process] {
        results[i] = process->restore(pairs);
        if (results[i] && wanted == CudaState::kRunning) results[i] = process->unlock();
        if (!results[i]) return;
        auto now = process->state();
        if (!now) {
          results[i] = fail(std::move(now.error()));
        } else if (*now != wanted) {
          results[i] =
              fail(ErrorCode::kWrongState, fmt::format("process {} is {} after the restore",
                                                       record.pid.value, cuda_state_name(*now)));
        }
      });
    }
  }
  for (auto& result : results) {
    if (!result) return std::move(result);
  }
  return {};
}

}  // namespace

Result<RestoreReport> restore(const Environment& env, const RestoreOptions& options) {
  Phases phases;
  phases.begin("verify");
  auto image = ImageReader::open(options.images_dir);
  if (!image) return fail(std::move(image.error()));
  const Manifest& manifest = image->manifest();
  // The cheap checks first: nobody waits for checksums to hear that a number is taken.
  auto criu = Criu::find(options.criu_path);
  if (!criu) return fail(std::move(criu.error()));
  if (auto ok = check_driver(env.driver, manifest); !ok) return fail(std::move(ok.error()));
  auto pairs = plan_gpus(env, manifest, options);
  if (!pairs) return fail(std::move(pairs.error()));
  if (auto ok = check_pids(manifest); !ok) return fail(std::move(ok.error()));
  if (auto ok = image->verify(env.progress, env.interrupt); !ok) {
    return fail(std::move(ok.error()));
  }
  auto log_dir = image->open_log_dir();
  if (!log_dir) return fail(std::move(log_dir.error()));

  std::vector<JournalTarget> targets;
  std::vector<Pid> pids;
  for (const ProcessRecord& record : manifest.processes) {
    pids.push_back(record.pid);
    if (record.cuda) {
      const CudaState wanted =
          options.leave_suspended ? CudaState::kCheckpointed : wanted_state(record);
      targets.push_back({record.pid, 0, wanted});
    }
  }
  auto journal = Journal::begin({"restore", manifest.root, Pid{}, image->path(), targets});
  if (!journal) return fail(std::move(journal.error()));
  ScopeGuard close_journal([&] { journal->finish(); });

  phases.begin("criu");
  const std::string log_name =
      fmt::format("restore-{:%Y%m%dT%H%M%SZ}.log", fmt::gmtime(std::time(nullptr)));
  const RestoreRequest request{
      image->criu_dir(),
      *log_dir,
      log_name,
      manifest.criu_options,
      options.inherit,
      manifest.root,
      pids,
      image->path() + "/log/" + log_name,
      kRestoreDeadlineBase + std::chrono::seconds(manifest.total_bytes / kSlowestBytesPerSecond),
      options.criu_log_level};
  auto tree = criu->restore(request, {}, env.interrupt);
  if (!tree) return fail(std::move(tree.error()));

  auto group = Group::open(env.driver, tree->root);
  if (!group) {
    (void)tree->root_fd.signal(SIGKILL);
    return fail(std::move(group.error()).within("looking at the restored tree; it was ended"));
  }
  group->dismiss();  // the way back is to end the tree: the image still has all of it
  auto done = journal->update(journal_targets(group->members()));
  if (done) done = env.interrupt.check();
  if (done && !options.leave_suspended) {
    phases.begin("restore");
    done = bring_back(*group, manifest, *pairs);
  }
  phases.end();
  if (!done) {
    kill_tree(*group);
    return fail(std::move(done.error()).within("the restored tree was ended; the image is intact"));
  }
  RestoreReport report{{}, image->path(), manifest.total_bytes, std::move(tree->root_fd)};
  report.root = tree->root;
  report.processes = report_processes(*group);
  report.total = phases.total();
  report.phases = phases.take();
  return report;
}

}  // namespace stasis
