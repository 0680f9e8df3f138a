#include "doctor/processes.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string_view>

#include <fmt/format.h>

#include "base/units.h"
#include "checkpoint/driver_obstacles.h"
#include "checkpoint/inherited_files.h"
#include "direct/agent_client.h"
#include "direct/left_to_driver.h"
#include "direct/sharing.h"
#include "direct/unknown_sharing.h"
#include "doctor/criu_obstacles.h"
#include "proc/cgroup.h"

namespace stasis {
namespace {

std::string name_of(const proc::ProcessInfo& info) {
  return fmt::format("process {} ({})", info.pid.value, info.comm);
}

Obstacle state_obstacle(const TreeMember& member, Pid root) {
  const std::string name = name_of(member.process.info());
  const Pid pid = member.process.pid();
  switch (*member.initial) {
    case CudaState::kFailed:
      return {"cuda-state", Severity::kRed, pid, name + ": the driver has given up its CUDA state",
              "end it, and restore it from an image if there is one"};
    case CudaState::kLocked:
    case CudaState::kCheckpointed:
      return {"cuda-state", Severity::kYellow, pid,
              fmt::format("{} uses CUDA and is {}", name,
                          *member.initial == CudaState::kLocked ? "locked" : "suspended"),
              fmt::format("a dump keeps it so; `stasis resume {}` makes it run", root.value)};
    case CudaState::kRunning:
      break;
  }
  return {"cuda-state", Severity::kGreen, pid, name + " uses CUDA and is running"};
}

void probe_gpu_memory(ProcessTree& tree, std::vector<Obstacle>& out) {
  if (auto fits = tree.check_host_memory(); !fits) {
    const bool may_leave_zeros =
        std::any_of(tree.members().begin(), tree.members().end(), [](const TreeMember& member) {
          const auto agent = direct::probe_agent(member.process.pid());
          return agent && *agent;
        });
    out.push_back({"gpu-memory",
                   may_leave_zeros ? Severity::kYellow : Severity::kRed,
                   {},
                   fits.error().message + (may_leave_zeros ? ", unless enough of it is zeros, "
                                                             "which a suspend finds out"
                                                           : ""),
                   fits.error().remedy});
    return;
  }
  out.push_back(
      {"gpu-memory",
       Severity::kGreen,
       {},
       format_bytes(tree.gpu_bytes()) + " of GPU memory in use, for which there is room"});
}

// What `suspend` and `dump` refuse: only the agent knows of it, so the doctor asks. Without an
// agent no tool can tell.
Result<void> probe_shared_gpu_memory(Driver& driver, const ProcessTree& tree,
                                     const Interrupt& interrupt, std::vector<Obstacle>& out) {
  constexpr ObstacleId kId = "shared-gpu-memory";
  constexpr std::chrono::seconds kTimeout{5};
  NoProgress silent;
  const Environment env{driver, interrupt, silent, {}};
  AgentSet agents;
  for (const TreeMember& member : tree.members()) {
    if (member.initial != CudaState::kRunning) continue;
    const std::string name = name_of(member.process.info());
    auto agent = find_agent(env, member.process, true);
    if (agent && !*agent) continue;
    STASIS_TRY(interrupt.check());
    if (agent) (*agent)->heed(&interrupt, direct::AgentClient::Heeds::kFirst);
    auto asked = agent ? (*agent)->ask(direct::AgentCommand::kNone, 0, kTimeout)
                       : Result<void>(fail(agent.error()));
    if (!asked) {
      out.push_back({kId, Severity::kYellow, member.process.pid(),
                     name + ": whether it shares GPU memory is not known: " + asked.error().message,
                     asked.error().remedy.empty() ? "ask again" : asked.error().remedy});
      continue;
    }
    const auto pieces = (*agent)->driver_share_count();
    agents.add(std::move(**agent));
    if (pieces == 0) continue;
    out.push_back({kId, Severity::kRed, member.process.pid(),
                   fmt::format("{} has {} of GPU memory open together with another process (CUDA "
                               "IPC), which the driver cannot restore",
                               name, pieces == 1 ? "1 piece" : fmt::format("{} pieces", pieces)),
                   "try when the processes have closed what they share (cudaIpcCloseMemHandle; "
                   "PyTorch: when the last tensor of another process is gone)"});
  }
  auto allowed = refuse_multicast(agents);
  std::size_t sharing = 0;
  if (allowed) {
    auto shares = ask_for_settled_shares(agents, interrupt);
    if (shares && any_imports(*shares))
      sharing = static_cast<std::size_t>(
          std::count_if(shares->begin(), shares->end(),
                        [](const ProcessShares& one) { return !one.shares.empty(); }));
    allowed = shares ? check_sharing(*shares) : Result<void>(fail(std::move(shares.error())));
  }
  if (!allowed)
    out.push_back({kId, Severity::kRed, {}, allowed.error().message, allowed.error().remedy});
  else if (sharing != 0)
    out.push_back({kId,
                   Severity::kGreen,
                   {},
                   fmt::format("{} processes share GPU memory, which their agents give up and take "
                               "again",
                               sharing)});
  return interrupt.check();
}

// A restore makes all threads anew, in the cgroup of who runs it.
void probe_room_for_threads(const proc::ProcFs& procfs, const std::vector<proc::ProcessInfo>& infos,
                            std::vector<Obstacle>& out) {
  const Pid self{static_cast<int>(::getpid())};
  const auto cgroup = proc::tightest_pids_cgroup(self);
  std::uint64_t threads = 0;
  for (const proc::ProcessInfo& info : infos)
    threads += procfs.threads(info.pid).size();
  const std::string what = fmt::format("processes: {}, threads: {}", infos.size(), threads);
  // They are given up before, if they are in it now.
  std::uint64_t room = cgroup ? cgroup->room() : threads;
  if (cgroup) {
    const auto here = proc::cgroup_directories(infos.front().pid, "pids");
    if (std::any_of(here.begin(), here.end(),
                    [&](const auto& one) { return one.path == cgroup->directory; })) {
      room += threads;
    }
  }
  if (room >= threads) {
    out.push_back({"limit-processes", Severity::kGreen, {}, what});
    return;
  }
  out.push_back(
      {"limit-processes",
       Severity::kYellow,
       {},
       fmt::format("{}, and {} leaves room for {} (limit {}): a restore from here fails", what,
                   cgroup->directory, cgroup->room(), cgroup->limit),
       fmt::format("restore from elsewhere, or raise {}/pids.max (systemd: TasksMax; containers: "
                   "--pids-limit)",
                   cgroup->directory)});
}

// A checkpoint closes the handles of NVML, too, since driver 570 (checkpoint-restore/criu#2953).
// Older ones are met where the library is that of a compatibility package.
void probe_nvml(const DriverInfo& driver, const proc::ProcFs& procfs,
                const std::vector<proc::ProcessInfo>& with_cuda, std::vector<Obstacle>& out) {
  constexpr int kClosesThem = 570;
  int major = 0;
  const std::string& version = driver.driver_version;
  std::from_chars(version.data(), version.data() + version.size(), major);
  if (major == 0 || major >= kClosesThem) return;
  for (const proc::ProcessInfo& info : with_cuda) {
    const auto uses = procfs.maps_file(info.pid, "libnvidia-ml.so");
    const auto files = procfs.open_files(info.pid);
    if (!uses || !*uses || !files) continue;
    if (std::none_of(files->begin(), files->end(),
                     [](const proc::OpenFile& file) { return file.path == "/dev/nvidiactl"; })) {
      continue;
    }
    out.push_back({"nvml", Severity::kYellow, info.pid,
                   fmt::format("{} uses NVML (libnvidia-ml), and driver {} leaves what it has open "
                               "at a checkpoint, which CRIU cannot dump",
                               name_of(info), version),
                   "install driver 570 or newer, or let the program do without NVML"});
  }
}

// What the driver would refuse or lose, and what it would but for the agents.
Result<void> probe_driver(Driver& driver, const proc::ProcFs& procfs, const ProcessTree& tree,
                          const std::vector<proc::ProcessInfo>& with_cuda,
                          std::vector<Obstacle>& out) {
  STASIS_TRY_ASSIGN(auto obstacles, find_obstacles(driver, procfs, with_cuda));
  for (const Obstacle& one : drop_lifted(obstacles)) {
    if (one.id != "managed-memory") continue;
    out.push_back({one.id, Severity::kGreen, one.pid,
                   fmt::format("process {} has managed memory, which its agent gives up and takes "
                               "again",
                               one.pid.value)});
  }
  for (Obstacle& obstacle : find_unknown_sharing(tree.members(), driver.info().simulated))
    obstacles.push_back(std::move(obstacle));
  for (Obstacle& obstacle : obstacles) {
    obstacle.what = fmt::format("process {}: {}", obstacle.pid.value, obstacle.what);
    out.push_back(std::move(obstacle));
  }
  return {};
}

void probe_inherited_files(const proc::ProcFs& procfs, ProcessTree& tree, bool simulated,
                           std::vector<Obstacle>& out) {
  auto inherited = find_inherited_files(procfs, tree.members(), simulated, false);
  if (!inherited) {
    out.push_back(
        {"gpu-files", Severity::kRed, {}, inherited.error().message, inherited.error().remedy});
  } else if (!inherited->empty()) {
    out.push_back({"gpu-files",
                   Severity::kGreen,
                   {},
                   fmt::format("device files of one that uses CUDA, in processes that were forked "
                               "from it ({}): a dump replaces them",
                               inherited->size())});
  }
}

}  // namespace

Result<std::vector<Obstacle>> examine_processes(Driver& driver, const proc::ProcFs& procfs,
                                                ProcessTree& tree, const CriuOptions& options,
                                                const Interrupt& interrupt,
                                                std::span<const std::string> connected) {
  std::vector<Obstacle> out;
  const auto infos = tree.infos();
  std::vector<proc::ProcessInfo> with_cuda;
  for (const TreeMember& member : tree.members()) {
    if (!member.initial) continue;
    out.push_back(state_obstacle(member, tree.root()));
    if (*member.initial != CudaState::kCheckpointed) with_cuda.push_back(member.process.info());
  }
  if (tree.cuda_count() == 0) {
    out.push_back({"cuda-state",
                   Severity::kRed,
                   {},
                   infos.size() == 1
                       ? "it does not use CUDA"
                       : fmt::format("none of the {} processes uses CUDA", infos.size()),
                   "if it was started just now, wait until it uses its GPU; `stasis ps` lists the "
                   "processes that use CUDA; without CUDA, `stasis run --images-dir` saves a job, "
                   "and criu alone dumps it"});
  }
  probe_gpu_memory(tree, out);
  STASIS_TRY(probe_driver(driver, procfs, tree, with_cuda, out));
  STASIS_TRY(probe_shared_gpu_memory(driver, tree, interrupt, out));
  probe_room_for_threads(procfs, infos, out);
  probe_nvml(driver.info(), procfs, with_cuda, out);
  const bool simulated = driver.info().simulated;
  probe_inherited_files(procfs, tree, simulated, out);
  if (proc::is_shell_job(infos)) {
    out.push_back(
        {"terminal",
         Severity::kGreen,
         {},
         "it belongs to a terminal, or to the session of another program such as your shell; a "
         "dump allows for that: --shell-job will be set"});
  }
  for (Obstacle& obstacle :
       find_undumpable(procfs, tree.members(), options, simulated, connected, interrupt))
    out.push_back(std::move(obstacle));
  STASIS_TRY(interrupt.check());
  return out;
}

}  // namespace stasis
