#include "direct/unknown_sharing.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "attach/gpu_survey.h"
#include "base/call_within.h"
#include "base/own_helpers.h"
#include "base/printable.h"
#include "base/units.h"
#include "checkpoint/driver_obstacles.h"
#include "direct/agent_lookup.h"
#include "direct/agent_probe.h"

namespace stasis {
namespace {

using FileId = std::pair<std::uint64_t, std::uint64_t>;  // device, inode

constexpr std::string_view kRemedy =
    "start all of them with `stasis run`, whose agents know it and bring shared memory back";

// Host memory that another process can have, too. Not the driver's own, nor the simulated one's.
std::set<FileId> shared_files(Pid pid) {
  std::set<FileId> out;
  (void)proc::ProcFs().for_each_mapping(
      pid,
      [&](const proc::Mapping& mapping) {
        const std::string_view path = mapping.path;
        const bool is_memory = path.starts_with("/dev/shm/") || path.starts_with("/memfd:") ||
                               path.starts_with("/SYSV");
        if (is_memory && mapping.permissions == "rw-s" &&
            path.find("nvidia") == std::string_view::npos &&
            path.find("stasis-") == std::string_view::npos)
          out.insert({mapping.device, mapping.inode});
        return true;
      },
      proc::ProcFs::Which::kOfFiles);
  return out;
}

// Those that have a file that another of them has.
std::set<Pid> sharers(const std::vector<Pid>& pids) {
  std::map<FileId, std::vector<Pid>> users;
  for (const Pid pid : pids)
    for (const FileId& file : shared_files(pid))
      users[file].push_back(pid);
  std::set<Pid> out;
  for (const auto& [file, all] : users)
    if (all.size() > 1) out.insert(all.begin(), all.end());
  return out;
}

// A process that uses CUDA and is not in the tree.
struct Outside {
  proc::ProcessInfo process;
  std::vector<Pid> sharers;  // that have host memory together with the one in the tree; or none
};

// This process, those that it has started for its work, and any other `stasis`: the tool forks
// itself to do the work. A program that calls the library is none, and others may run its file.
class ToolsOwn {
 public:
  bool has(Pid pid) const {
    return pid.value == ::getpid() || helpers_.contains(pid) ||
           (is_tool_ && program_of(pid) == program_);
  }

 private:
  static std::string program_of(Pid pid) {
    std::error_code failed;
    return std::filesystem::read_symlink(fmt::format("/proc/{}/exe", pid.value), failed).string();
  }

  std::set<Pid> helpers_ = own_helpers();
  std::string program_ = program_of(Pid{static_cast<int>(::getpid())});
  bool is_tool_ = std::filesystem::path(program_).filename() == "stasis";
};

// Rather one that has a file of these than one that has none.
std::optional<Outside> other_user_of_cuda(const std::set<FileId>& files,
                                          const std::vector<TreeMember>& members) {
  const proc::ProcFs procfs;
  std::optional<Outside> out;
  auto all = procfs.all();
  if (!all) return out;
  const ToolsOwn own;
  std::erase_if(*all, [&](const proc::ProcessInfo& info) {
    return info.has_ended() ||
           std::any_of(members.begin(), members.end(),
                       [&](const TreeMember& member) { return member.process.pid() == info.pid; });
  });
  std::vector<Pid> pids;
  for (const proc::ProcessInfo& info : *all)
    pids.push_back(info.pid);
  const auto with_driver = procfs.maps_file_each(pids, "libcuda.so");
  for (std::size_t i = 0; i < pids.size(); ++i) {
    if (!with_driver[i].value_or(false)) continue;
    const proc::ProcessInfo& info = (*all)[i];
    const auto theirs = shared_files(info.pid);
    const bool shares = std::any_of(theirs.begin(), theirs.end(),
                                    [&](const FileId& file) { return files.contains(file); });
    // A program that calls the library may have CUDA, and share host memory with this one.
    if (!shares && own.has(info.pid)) continue;
    if (!out || (shares && out->sharers.empty())) out = Outside{info, {}};
    if (shares) out->sharers.push_back(info.pid);
  }
  return out;
}

// May one of these have memory of another process's? Also if it cannot be asked.
bool may_import(const std::vector<Pid>& pids, bool simulated) {
  return std::any_of(pids.begin(), pids.end(), [&](Pid pid) {
    const auto survey = attach::survey_gpu_memory(pid, simulated);
    if (survey) return !survey->is_clean();
    const ErrorCode code = survey.error().code;
    return code != ErrorCode::kProcessGone && code != ErrorCode::kNoSuchProcess;
  });
}

constexpr std::uint64_t kLeastShared = std::uint64_t{128} << 10;

Obstacle unknown(Pid pid, std::string what) {
  return {"sharing-unknown", Severity::kRed,       pid,
          std::move(what),   std::string(kRemedy), Override::kIgnoreObstacles};
}

// An agent that is loaded and says nothing knows of no shared memory.
bool knows_sharing(Pid pid) {
  const auto agent = direct::probe_agent(pid);
  // One that came later does not know what the program had imported before.
  if (agent && agent->has_value())
    return (*agent)->of_our_version && (*agent)->origin == direct::AgentOrigin::kStarted;
  return agent_library(pid) == AgentLibrary::kWorks;
}

bool has_agent(Pid pid) {
  const auto agent = direct::probe_agent(pid);
  return agent && agent->has_value();
}

// It knows, and cannot be asked; what it serves looks like another's.
bool is_of_another_version(Pid pid) {
  const auto agent = direct::probe_agent(pid);
  return agent && agent->has_value() && !(*agent)->of_our_version;
}

// PyTorch has some 500 of its libraries' variables, of at most 100 KiB, and what frameworks share
// with each other is larger (docs/adr/0052-calls-inside.md).
bool is_small(const attach::GpuSurvey& survey) {
  return survey.is_whole &&
         std::all_of(survey.memory.begin(), survey.memory.end(), [](const auto& one) {
           return !one.may_be_imported || one.bytes < kLeastShared;
         });
}

void judge_survey(Pid pid, const attach::GpuSurvey& survey, std::vector<Obstacle>& out) {
  const auto mappings = proc::ProcFs().mappings(pid);
  if (survey.has_managed() && mappings && managed_bytes(*mappings) == 0) {
    out.push_back({"managed-memory", Severity::kRed, pid,
                   "managed memory, which the driver refuses to checkpoint",
                   "start it with `stasis run`, or use memory from cudaMalloc",
                   Override::kIgnoreObstacles});
  }
  if (survey.is_clean()) return;
  const std::uint64_t count = survey.candidate_count();
  Obstacle obstacle = unknown(
      pid,
      count == 0
          ? std::string("more GPU memory than the tool asks the driver about; some may be another "
                        "process's, and the driver would save that and could not restore it (the "
                        "job would be lost)")
          : fmt::format(
                "{} of GPU memory ({}) that may be another process's (CUDA IPC, or imported "
                "by descriptor) or its own (cuMemCreate, a module's variables): the driver does "
                "not say which, and saves another's without being able to restore it (the job "
                "would be lost)",
                count == 1 ? "1 piece" : fmt::format("{} pieces", count),
                format_bytes(survey.candidate_bytes())));
  if (is_small(survey)) obstacle.severity = Severity::kYellow;
  out.push_back(std::move(obstacle));
}

Obstacle of_another_version(Pid pid) {
  Obstacle obstacle = unknown(
      pid,
      "GPU memory that may be another process's: its agent is of another version and cannot say; "
      "the driver saves memory of another process and cannot restore it (the job would be lost)");
  obstacle.remedy = "use the stasis that came with that agent";
  return obstacle;
}

Obstacle not_asked(Pid pid, const Error& why) {
  return unknown(
      pid, fmt::format("GPU memory that may be another process's: the driver in it cannot be asked "
                       "({}); it saves memory of another process and cannot restore it (the job "
                       "would be lost)",
                       why.message));
}

// Whose memory it may be.
void name_outside(const Outside& outside, std::vector<Obstacle>& obstacles) {
  const bool shares = !outside.sharers.empty();
  for (Obstacle& obstacle : obstacles) {
    if (obstacle.id != "sharing-unknown") continue;
    if (!shares) obstacle.severity = Severity::kYellow;
    obstacle.what += fmt::format("; {} process {} ({}), which uses CUDA and is not in the tree",
                                 shares ? "it shares host memory with" : "there is",
                                 outside.process.pid.value, printable(outside.process.comm));
  }
}

}  // namespace

std::vector<Obstacle> find_unknown_sharing(const std::vector<TreeMember>& members, bool simulated,
                                           bool asked_only) {
  std::vector<Pid> with_cuda;
  std::vector<Pid> to_ask;
  for (const TreeMember& member : members) {
    if (!member.initial || !member.process.alive()) continue;
    const Pid pid = member.process.pid();
    with_cuda.push_back(pid);
    if (*member.initial == CudaState::kRunning && !knows_sharing(pid)) to_ask.push_back(pid);
  }
  // A process of any user may have many mappings.
  const KeptCallThread calls;
  std::vector<Obstacle> out;
  std::optional<Outside> outside;
  if (with_cuda.size() < 2) {
    // One of several that the user has named by itself.
    if (!to_ask.empty()) outside = other_user_of_cuda(shared_files(to_ask.front()), members);
    if (!outside) return out;
    // Its agent came later, when it was asked, and has seen all since.
    if (outside->sharers.empty() && has_agent(to_ask.front())) return out;
    with_cuda.push_back(outside->process.pid);
  }
  const bool shares_outside = outside && !outside->sharers.empty();
  std::optional<bool> outside_imports;
  std::optional<std::set<Pid>> sharing;
  for (const Pid pid : to_ask) {
    if (is_of_another_version(pid)) {
      if (!asked_only) out.push_back(of_another_version(pid));
      continue;
    }
    auto survey = attach::survey_gpu_memory(pid, simulated);
    if (survey) {
      // Its own may be what the other has imported, by descriptor or by CUDA IPC, by which any of
      // cuMemAlloc can be: suspended alone it would come back with other memory than that, and
      // neither would know.
      if (shares_outside && survey->is_clean() && !outside_imports)
        outside_imports = may_import(outside->sharers, simulated);
      if (shares_outside)
        for (auto& one : survey->memory)
          one.may_be_imported |=
              one.answer.values[attach::kSurveyHandles] != 0 ||
              (outside_imports.value_or(false) && one.answer.values[attach::kSurveyIpc] != 0);
      const bool speaks_for_it = !outside || shares_outside || !is_small(*survey);
      if (speaks_for_it || survey->has_managed()) judge_survey(pid, *survey, out);
      continue;
    }
    const ErrorCode code = survey.error().code;
    if (asked_only || code == ErrorCode::kProcessGone || code == ErrorCode::kNoSuchProcess)
      continue;
    if (!sharing) sharing = sharers(with_cuda);
    Obstacle obstacle = not_asked(pid, survey.error());
    if (sharing->contains(pid) && !outside)
      obstacle.what += "; it shares host memory with another process of the tree";
    else if (!outside)
      obstacle.severity = Severity::kYellow;
    out.push_back(std::move(obstacle));
  }
  if (outside) name_outside(*outside, out);
  return out;
}

}  // namespace stasis
