#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <future>
#include <system_error>
#include <thread>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "base/scope_guard.h"
#include "checkpoint/suspended.h"
#include "image/image_reader.h"
#include "operations/common.h"

namespace stasis {

namespace {

constexpr int kKillWaitMs = 10000;
constexpr Seconds kReapPatience{2};
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

// Every uuid is one of the manifest's GPUs, which gpus_of() has judged.
std::vector<GpuUse> gpu_use_of(const ProcessRecord& record) {
  std::vector<GpuUse> uses;
  for (const GpuMemoryRecord& use : record.gpu_memory) {
    if (const auto uuid = GpuUuid::parse(use.gpu_uuid)) uses.push_back({*uuid, use.bytes});
  }
  return uses;
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

Error pid_in_use(const proc::ProcessInfo& user) {
  const bool zombie = user.state == 'Z';
  return {
      ErrorCode::kPidInUse,
      fmt::format("the image needs process number {}, which is in use by {}{}", user.pid.value,
                  user.comm,
                  zombie ? fmt::format(": it has exited, and its parent {} has not waited for it",
                                       user.parent.value)
                         : ""),
      fmt::format("{}, or restore in a PID namespace of its own: unshare --pid --fork "
                  "--mount-proc stasis restore ...",
                  zombie ? fmt::format("end process {}", user.parent.value)
                         : "is the job still running? end what uses the number"),
      {},
      {}};
}

Result<void> check_pids(const Manifest& manifest) {
  const proc::ProcFs procfs;
  const auto start = Clock::now();
  for (const ProcessRecord& record : manifest.processes) {
    auto info = procfs.process(record.pid);
    // A dump has just ended the job, and those who have to wait for it come to it in a moment.
    while (info && info->state == 'Z' && since(start) < kReapPatience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      info = procfs.process(record.pid);
    }
    if (info) return fail(pid_in_use(*info));
    if (info.error().code == ErrorCode::kNoSuchProcess) continue;
    if (info.error().code != ErrorCode::kThreadId) return fail(std::move(info.error()));
    return fail(ErrorCode::kPidInUse,
                fmt::format("the image needs process number {}, which is in use: {}",
                            record.pid.value, info.error().message),
                "restore in a PID namespace of its own: unshare --pid --fork --mount-proc stasis "
                "restore ...");
  }
  return {};
}

Result<std::vector<GpuPair>> plan_gpus(const Environment& env, const Manifest& manifest,
                                       std::span<const Gpu> from, const RestoreOptions& options) {
  auto to = env.driver.gpus();
  if (!to) return fail(std::move(to.error()));
  auto pairs = plan_gpu_map(env.driver, options.gpu_map, from, *to);
  if (!pairs) return fail(std::move(pairs.error()));
  if (options.leave_suspended) return pairs;
  std::vector<GpuUse> needed;
  for (const ProcessRecord& record : manifest.processes) {
    if (!record.cuda || wanted_state(record) == CudaState::kCheckpointed) continue;
    const std::vector<GpuUse> uses = gpu_use_of(record);
    needed.insert(needed.end(), uses.begin(), uses.end());
  }
  if (auto fits = check_gpu_memory(needed, *pairs, *to); !fits) {
    return fail(std::move(fits.error()));
  }
  return pairs;
}

// The processes of the image, in its order; nothing for one that was a zombie at the dump.
using Tree = std::vector<std::optional<Process>>;

// Takes hold of every process of the image while all of them stand still: later, one that ends at
// once could not be told from another with its number.
Result<Tree> take_hold(Driver& driver, const Manifest& manifest) {
  Tree tree;
  for (const ProcessRecord& record : manifest.processes) {
    auto process = Process::open(driver, record.pid);
    if (process) {
      tree.emplace_back(std::move(*process));
    } else if (!record.cuda && process.error().code == ErrorCode::kZombie) {
      tree.emplace_back();
    } else {
      return fail(std::move(process.error()).within("taking hold of the restored processes"));
    }
  }
  return tree;
}

std::vector<JournalTarget> targets_of(const Manifest& manifest, const Tree& tree,
                                      bool leave_suspended) {
  std::vector<JournalTarget> targets;
  for (std::size_t i = 0; i < manifest.processes.size(); ++i) {
    const ProcessRecord& record = manifest.processes[i];
    if (!record.cuda) continue;
    const std::uint64_t start = i < tree.size() && tree[i] ? tree[i]->info().start_ticks : 0;
    targets.push_back(
        {record.pid, start, leave_suspended ? CudaState::kCheckpointed : wanted_state(record)});
  }
  return targets;
}

// Ends the restored tree and what it has started since, and reaps the root, which is our child.
void kill_tree(const RestoredTree& restored, const Tree& tree) {
  std::vector<Pidfd> younger;
  if (auto now = proc::ProcFs().tree(restored.root)) {
    for (const proc::ProcessInfo& info : *now) {
      if (auto pidfd = Pidfd::open(info.pid)) younger.push_back(std::move(*pidfd));
    }
  }
  // Parents first: who sees a child die may start it anew.
  (void)restored.root_fd.signal(SIGKILL);
  for (const auto& process : tree) {
    if (process) (void)process->pidfd().signal(SIGKILL);
  }
  for (const Pidfd& pidfd : younger)
    (void)pidfd.signal(SIGKILL);
  for (const auto& process : tree) {
    if (process) (void)process->pidfd().wait_exit(kKillWaitMs);
  }
  if (restored.root_fd.wait_exit(kKillWaitMs)) {
    siginfo_t info{};
    while (::waitid(P_PID, static_cast<id_t>(restored.root.value), &info, WEXITED) != 0 &&
           errno == EINTR) {
    }
  }
}

// Brings the GPU state of one process to what was asked for, and verifies it by asking.
Result<void> bring_back(Process& process, CudaState wanted, std::span<const GpuPair> pairs) {
  Result<void> done;
  if (wanted != CudaState::kCheckpointed) done = process.restore(pairs);
  if (done && wanted == CudaState::kRunning) done = process.unlock();
  if (done && wanted == CudaState::kLocked) done = process.let_go_on();
  if (!done) return done;
  auto now = process.state();
  // One that has its state back may come to its end like any other.
  if (!now && wanted == CudaState::kRunning && now.error().code == ErrorCode::kProcessGone) {
    return {};
  }
  if (!now) return fail(std::move(now.error()));
  if (*now == wanted) return {};
  return fail(ErrorCode::kWrongState,
              fmt::format("process {} is {} after the restore, and should be {}",
                          process.pid().value, cuda_state_name(*now), cuda_state_name(wanted)),
              "another tool acts on it; wait for it to end, then restore again");
}

// All of them at the same time.
Result<void> bring_back(Tree& tree, const std::vector<JournalTarget>& targets,
                        std::span<const GpuPair> pairs) {
  std::vector<Result<void>> results(targets.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const auto process = std::find_if(
          tree.begin(), tree.end(), [&](const auto& p) { return p && p->pid() == targets[i].pid; });
      if (process == tree.end()) continue;
      const auto work = [&results, &targets, &pairs, i, process] {
        results[i] = bring_back(**process, targets[i].initial, pairs);
      };
      try {
        threads.emplace_back(work);
      } catch (const std::system_error&) {  // no thread to be had
        work();
      }
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
  if (options.leave_suspended && !options.gpu_map.empty()) {
    return fail(ErrorCode::kUsage, "a GPU map is for the moment at which GPU memory comes back",
                "give --device-map to `stasis resume` instead");
  }
  // The cheap checks first: nobody waits for checksums to hear that a number is taken.
  auto criu = Criu::find(options.criu_path);
  if (!criu) return fail(std::move(criu.error()));
  auto old_gpus = gpus_of(manifest);
  if (!old_gpus) return fail(std::move(old_gpus.error()));
  if (auto ok = check_driver(env.driver, manifest); !ok) return fail(std::move(ok.error()));
  auto pairs = plan_gpus(env, manifest, *old_gpus, options);
  if (!pairs) return fail(std::move(pairs.error()));
  if (auto ok = check_pids(manifest); !ok) return fail(std::move(ok.error()));
  if (auto ok = image->verify(env.progress, env.interrupt, ImageReader::Part::kAllButPages); !ok) {
    return fail(std::move(ok.error()));
  }
  auto log_dir = image->open_log_dir();
  if (!log_dir) return fail(std::move(log_dir.error()));

  std::vector<Pid> pids;
  for (const ProcessRecord& record : manifest.processes)
    pids.push_back(record.pid);
  Tree processes;
  auto targets = targets_of(manifest, processes, options.leave_suspended);
  auto journal = Journal::begin({"restore", manifest.root, Pid{}, image->path(), {}});
  if (!journal) return fail(std::move(journal.error()));
  ScopeGuard close_journal([&] { journal->finish(); });
  if (auto entered = journal->update(targets); !entered) return fail(std::move(entered.error()));

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
  // While CRIU reads the pages we do too: nothing of the tree runs before they are found sound. The
  // driver gets ready meanwhile.
  auto pages = std::async(std::launch::async, [&] {
    return image->verify(env.progress, env.interrupt, ImageReader::Part::kPages);
  });
  std::future<void> driver_ready;
  if (!options.leave_suspended) {
    driver_ready = std::async(std::launch::async, [&] { env.driver.prepare_restore(); });
  }
  const auto take = [&]() -> Result<void> {
    if (auto sound = pages.get(); !sound) return sound;
    auto held = take_hold(env.driver, manifest);
    if (!held) return fail(std::move(held.error()));
    processes = std::move(*held);
    // For `stasis resume`, and for `stasis recover` if we are killed from here on.
    for (std::size_t i = 0; i < processes.size(); ++i) {
      const ProcessRecord& record = manifest.processes[i];
      if (record.cuda) remember_suspended(*processes[i], {gpu_use_of(record), *old_gpus});
    }
    targets = targets_of(manifest, processes, options.leave_suspended);
    return journal->update(targets);
  };
  auto restored = criu->restore(request, take, env.interrupt);
  if (!restored) {
    // CRIU may well have stumbled over what the checksums show.
    if (pages.valid()) {
      if (auto sound = pages.get(); !sound) return fail(std::move(sound.error()));
    }
    return fail(std::move(restored.error()));
  }

  auto done = env.interrupt.check();
  if (done) {
    phases.begin("restore");
    done = bring_back(processes, targets, *pairs);
  }
  phases.end();
  if (!done) {
    kill_tree(*restored, processes);
    return fail(std::move(done.error()).within("the restored tree was ended; the image is intact"));
  }
  RestoreReport report{{}, image->path(), manifest.total_bytes, std::move(restored->root_fd)};
  report.root = restored->root;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    if (!processes[i]) continue;
    const ProcessRecord& record = manifest.processes[i];
    std::uint64_t bytes = 0;
    for (const GpuUse& use : gpu_use_of(record))
      bytes += use.bytes;
    report.processes.push_back(report_process(*processes[i], record.cuda, bytes));
    const bool suspended =
        options.leave_suspended || wanted_state(record) == CudaState::kCheckpointed;
    if (!suspended) forget_suspended(*processes[i]);
  }
  report.total = phases.total();
  report.phases = phases.take();
  return report;
}

}  // namespace stasis
