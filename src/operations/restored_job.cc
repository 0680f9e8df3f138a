#include "operations/restored_job.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

#include <fmt/format.h>

#include "base/threads.h"
#include "checkpoint/suspend_record.h"
#include "operations/restore_checks.h"

namespace stasis {

namespace {

constexpr int kKillWaitMs = 10000;
constexpr std::chrono::milliseconds kProgressInterval{100};

// One that has its GPU state back; verifies by asking that it is in what was asked for.
Result<void> let_go_on(Process& process, CudaState wanted) {
  if (wanted == CudaState::kRunning) STASIS_TRY(process.unlock());
  if (wanted == CudaState::kLocked) STASIS_TRY(process.let_go_on());
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

// Tells the progress of a driver that moves GPU memory out of the processes' own memory, which
// shrinks by as much, until `running` is zero.
void watch(const std::vector<Process*>& processes, std::uint64_t total,
           const std::atomic<std::size_t>& running, Progress& progress) {
  const proc::ProcFs procfs;
  const auto resident = [&] {
    std::uint64_t sum = 0;
    for (const Process* process : processes) {
      if (auto bytes = procfs.resident_bytes(process->pid())) sum += *bytes;
    }
    return sum;
  };
  const std::uint64_t before = resident();
  const auto start = Clock::now();
  auto told = start;
  while (running.load() > 0) {
    // Short steps at first: a small job is done within milliseconds.
    std::this_thread::sleep_for(
        std::chrono::milliseconds(Clock::now() - start < kProgressInterval ? 1 : 10));
    if (Clock::now() - told < kProgressInterval) continue;
    told = Clock::now();
    const std::uint64_t now = resident();
    progress.update("restore", before > now ? std::min(before - now, total) : 0, total);
  }
}

}  // namespace

Result<void> RestoredJob::take_hold(Driver& driver, std::span<const Gpu> old_gpus,
                                    const std::string& image, bool leave_suspended) {
  const auto stays = [&](const ProcessRecord& record) {
    return record.cuda && (leave_suspended || wanted_state(record) == CudaState::kCheckpointed);
  };
  std::optional<proc::ProcessInfo> root;
  if (std::count_if(manifest_.processes.begin(), manifest_.processes.end(), stays) > 1) {
    if (auto info = proc::ProcFs().process(manifest_.root)) root = std::move(*info);
  }
  for (const ProcessRecord& record : manifest_.processes) {
    auto process = Process::open(driver, record.pid);
    if (process) {
      if (record.cuda) {
        SuspendedMemory memory{gpu_use_of(record), {old_gpus.begin(), old_gpus.end()}, image};
        if (root) memory.with = root->id();
        auto remembered = remember_suspended(*process, memory);
        if (!remembered && !image.empty()) return remembered;
      }
      processes_.emplace_back(std::move(*process));
    } else if (!record.cuda && process.error().code == ErrorCode::kZombie) {
      processes_.emplace_back();
    } else if (process.error().code == ErrorCode::kNoSuchProcess) {
      return fail(ErrorCode::kImageCorrupt,
                  fmt::format("the manifest names process {}, which the image's files do not hold",
                              record.pid.value),
                  "the manifest is not the one of this image: restore from another one, or copy it "
                  "again from where it came from");
    } else {
      return fail(std::move(process.error()).within("taking hold of the restored processes"));
    }
  }
  return {};
}

std::vector<JournalTarget> RestoredJob::targets(bool leave_suspended) const {
  std::vector<JournalTarget> targets;
  for (std::size_t i = 0; i < manifest_.processes.size(); ++i) {
    const ProcessRecord& record = manifest_.processes[i];
    if (!record.cuda) continue;
    const bool held = i < processes_.size() && processes_[i];
    targets.emplace_back(record.pid, held ? processes_[i]->info().start_ticks : 0,
                         leave_suspended ? CudaState::kCheckpointed : wanted_state(record));
  }
  return targets;
}

std::vector<const Process*> RestoredJob::to_run(std::span<const JournalTarget> targets) const {
  std::vector<const Process*> running;
  for (const auto& process : processes_) {
    if (!process) continue;
    const bool runs = std::any_of(targets.begin(), targets.end(), [&](const JournalTarget& target) {
      return target.pid == process->pid() && target.initial == CudaState::kRunning;
    });
    if (runs) running.push_back(&*process);
  }
  return running;
}

Result<void> RestoredJob::bring_back(std::span<const JournalTarget> targets,
                                     std::span<const GpuPair> pairs, Progress& progress,
                                     const std::function<void()>& before_they_run) {
  std::vector<Process*> processes;
  std::vector<CudaState> wanted;
  std::uint64_t total = 0;
  for (const JournalTarget& target : targets) {
    const auto found = std::find_if(processes_.begin(), processes_.end(),
                                    [&](const auto& p) { return p && p->pid() == target.pid; });
    if (found == processes_.end()) continue;
    processes.push_back(&**found);
    wanted.push_back(target.initial);
    if (target.initial == CudaState::kCheckpointed) continue;
    const auto record = manifest_.processes.begin() + (found - processes_.begin());
    total += total_bytes(gpu_use_of(*record));
  }
  const auto for_all = [&](const std::function<Result<void>(std::size_t)>& act) -> Result<void> {
    std::vector<Result<void>> results(processes.size());
    std::atomic<std::size_t> running = processes.size();
    at_once(
        processes.size(),
        [&](std::size_t i) {
          results[i] = act(i);
          --running;
        },
        [&] { watch(processes, total, running, progress); });
    for (auto& result : results)
      STASIS_TRY(std::move(result));
    return {};
  };
  // A restore makes contexts, beside which none of them may run (direct/mover_server.h).
  STASIS_TRY(for_all([&](std::size_t i) {
    return wanted[i] == CudaState::kCheckpointed ? Result<void>() : processes[i]->restore(pairs);
  }));
  before_they_run();
  return for_all([&](std::size_t i) { return let_go_on(*processes[i], wanted[i]); });
}

Result<void> RestoredJob::check_alive() const {
  for (const auto& process : processes_) {
    if (!process || process->alive()) continue;
    return fail(ErrorCode::kProcessGone,
                fmt::format("process {} ({}) has ended while CRIU was restoring it",
                            process->pid().value, process->info().comm),
                "see whether a user has killed it, or the kernel for lack of memory (`dmesg`)");
  }
  return {};
}

std::uint64_t RestoredJob::resident_bytes() const {
  const proc::ProcFs procfs;
  std::uint64_t sum = 0;
  for (const ProcessRecord& record : manifest_.processes) {
    if (auto bytes = procfs.resident_bytes(record.pid)) sum += *bytes;
  }
  return sum;
}

RestoredTree RestoredJob::keep(bool leave_suspended) {
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    const bool suspended =
        leave_suspended || wanted_state(manifest_.processes[i]) == CudaState::kCheckpointed;
    if (processes_[i] && !suspended) forget_suspended(*processes_[i]);
  }
  over_ = true;
  return std::move(*root_);
}

// Before CRIU has handed the tree over: is what has the root's number a child of ours?
bool RestoredJob::is_ours() const {
  auto info = proc::ProcFs().process(manifest_.root);
  return info && info->parent.value == ::getpid() && !info->has_ended();
}

// Ends it and what it has started since, and reaps the root, which is our child.
bool RestoredJob::end() {
  if (over_) return *over_;
  std::vector<Pidfd> younger;
  if (root_) {
    if (auto now = proc::ProcFs().tree(root_->root)) {
      for (const proc::ProcessInfo& info : *now) {
        if (auto pidfd = Pidfd::open(info.pid)) younger.push_back(std::move(*pidfd));
      }
    }
    // Parents first: a parent that sees a child die may start it anew.
    (void)root_->root_fd.signal(SIGKILL);
  }
  for (const auto& process : processes_) {
    if (process) (void)process->pidfd().signal(SIGKILL);
  }
  for (const Pidfd& pidfd : younger)
    (void)pidfd.signal(SIGKILL);
  bool gone = true;
  for (const auto& process : processes_) {
    if (!process) continue;
    if (!process->pidfd().wait_exit(kKillWaitMs)) gone = false;
    forget_suspended(*process);
  }
  if (root_ && root_->root_fd.wait_exit(kKillWaitMs)) {
    siginfo_t info{};
    while (::waitid(P_PID, static_cast<id_t>(root_->root.value), &info, WEXITED) != 0 &&
           errno == EINTR) {
    }
  } else if (root_ || is_ours()) {
    gone = false;
  }
  over_ = gone;
  return gone;
}

}  // namespace stasis
