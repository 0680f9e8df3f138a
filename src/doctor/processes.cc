#include "doctor/processes.h"

#include <string_view>

#include <fmt/format.h>

#include "base/units.h"
#include "checkpoint/inherited_files.h"
#include "checkpoint/obstacles.h"
#include "doctor/undumpable.h"

namespace stasis {
namespace {

std::string name_of(const proc::ProcessInfo& info) {
  return fmt::format("process {} ({})", info.pid.value, info.comm);
}

Finding state_finding(const GroupMember& member) {
  const std::string name = name_of(member.process.info());
  switch (*member.initial) {
    case CudaState::kFailed:
      return {"cuda-state", Light::kRed, name + ": the driver has given up its CUDA state",
              "end it, and restore it from an image if there is one"};
    case CudaState::kLocked:
    case CudaState::kCheckpointed:
      return {"cuda-state", Light::kYellow,
              fmt::format("{} uses CUDA and is {}", name, cuda_state_name(*member.initial)),
              "a dump keeps it so; `stasis recover` makes it run"};
    case CudaState::kRunning:
      break;
  }
  return {"cuda-state", Light::kGreen, name + " uses CUDA and is running", ""};
}

void look_at_gpu_memory(Group& group, std::vector<Finding>& out) {
  if (auto fits = group.check_host_memory(); !fits) {
    out.push_back({"gpu-memory", Light::kRed, fits.error().message, fits.error().remedy});
    return;
  }
  out.push_back({"gpu-memory", Light::kGreen,
                 format_bytes(group.gpu_bytes()) + " of GPU memory in use, for which there is room",
                 ""});
}

}  // namespace

Result<std::vector<Finding>> examine_processes(Driver& driver, const proc::ProcFs& procfs,
                                               Group& group, const CriuOptions& options) {
  std::vector<Finding> out;
  const auto infos = group.infos();
  std::vector<proc::ProcessInfo> with_cuda;
  for (const GroupMember& member : group.members()) {
    if (!member.initial) continue;
    out.push_back(state_finding(member));
    if (*member.initial != CudaState::kCheckpointed) with_cuda.push_back(member.process.info());
  }
  if (group.cuda_count() == 0) {
    out.push_back({"cuda-state", Light::kYellow,
                   fmt::format("none of the {} process(es) uses CUDA", infos.size()),
                   "criu alone can dump it; `stasis ps` lists the processes that use CUDA"});
  }
  look_at_gpu_memory(group, out);
  auto obstacles = find_obstacles(driver, procfs, with_cuda);
  if (!obstacles) return fail(std::move(obstacles.error()));
  for (const Obstacle& obstacle : *obstacles) {
    out.push_back({"obstacle", Light::kRed,
                   fmt::format("process {}: {}", obstacle.pid.value, obstacle.what),
                   obstacle.remedy});
  }
  const bool simulated = driver.info().simulated;
  auto inherited = find_inherited_files(procfs, group.members(), simulated, false);
  if (!inherited) {
    out.push_back({"gpu-files", Light::kRed, inherited.error().message, inherited.error().remedy});
  } else if (!inherited->empty()) {
    out.push_back({"gpu-files", Light::kGreen,
                   fmt::format("{} process(es) forked from one that uses CUDA have its device "
                               "files, which a dump replaces",
                               inherited->size()),
                   ""});
  }
  if (proc::is_shell_job(infos)) {
    out.push_back({"terminal", Light::kGreen,
                   "it hangs on a terminal or a session of somebody else: --shell-job will be set",
                   ""});
  }
  for (Finding& finding : find_undumpable(procfs, group.members(), options, simulated))
    out.push_back(std::move(finding));
  return out;
}

}  // namespace stasis
