#include "operations/dump_manifest.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/host_name.h"
#include "base/threads.h"
#include "base/version.h"
#include "checkpoint/suspend_record.h"
#include "criu/criu_core.h"
#include "criu/criu_sockets.h"
#include "proc/tcp_ports.h"

namespace stasis {

namespace {

std::vector<GpuMemoryRecord> gpu_memory_of(const ProcessTree& tree, const TreeMember& member) {
  std::vector<GpuUse> uses = tree.gpu_use_of(member.process.pid());
  if (uses.empty() && member.initial) {
    if (auto memory = recall_suspended(member.process)) uses = std::move(memory->uses);
  }
  std::vector<GpuMemoryRecord> out;
  out.reserve(uses.size());
  for (const GpuUse& part : uses)
    out.push_back({part.gpu.to_string(), part.bytes});
  return out;
}

// The numbers of a process's threads without its own.
std::vector<Tid> other_threads(const proc::ProcFs& procfs, Pid pid) {
  std::vector<Tid> threads = procfs.threads(pid);
  std::erase(threads, Tid{pid.value});
  std::sort(threads.begin(), threads.end());
  return threads;
}

}  // namespace

Manifest describe_dump(const Environment& env, const ProcessTree& tree, const Criu& criu,
                       const CriuOptions& options, std::span<const Gpu> gpus) {
  Manifest manifest;
  manifest.stasis_version = kVersion;
  manifest.hostname = host_name();
  manifest.kernel_release = proc::kernel_release();
  manifest.criu_version = criu.version();
  manifest.driver_version = env.driver.info().driver_version;
  manifest.cuda_version = env.driver.info().cuda_version;
  manifest.simulated = env.driver.info().simulated;
  for (const Gpu& gpu : gpus) {
    manifest.gpus.push_back({gpu.uuid.to_string(), gpu.name, gpu.memory_total, gpu.pci_bus_id});
  }
  manifest.root = tree.root();
  manifest.criu_options = options;
  return manifest;
}

Result<std::vector<ProcessRecord>> take_stock(const ProcessTree& tree) {
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(auto infos, procfs.tree(tree.root()));
  proc::TcpPorts ports(procfs);
  std::vector<ProcessRecord> records;
  for (const proc::ProcessInfo& info : infos) {
    ProcessRecord record;
    record.pid = info.pid;
    if (info.pid != tree.root()) record.parent = info.parent;
    if (auto details = procfs.details(info.pid)) record.command = std::move(details->argv);
    record.threads = other_threads(procfs, info.pid);
    record.tcp_ports = ports.of(info.pid);
    const auto member =
        std::find_if(tree.members().begin(), tree.members().end(),
                     [&](const TreeMember& m) { return m.process.id() == info.id(); });
    if (member == tree.members().end()) {
      auto maps = procfs.maps_file(info.pid, "libcuda.so");
      if (maps && *maps) {
        return fail(ErrorCode::kBusy,
                    fmt::format("process {} ({}) has appeared during the dump, and may use CUDA",
                                info.pid.value, info.comm),
                    "dump once more");
      }
    } else if (member->initial && member->process.alive()) {
      record.cuda = true;
      record.cuda_state =
          *member->initial == CudaState::kFailed ? CudaState::kRunning : *member->initial;
      record.gpu_memory = gpu_memory_of(tree, *member);
    }
    records.push_back(std::move(record));
  }
  for (const TreeMember& member : tree.members()) {
    const bool there = std::any_of(records.begin(), records.end(), [&](const ProcessRecord& r) {
      return r.pid == member.process.pid();
    });
    if (there || !member.initial || !member.process.alive()) continue;
    return fail(
        ErrorCode::kBusy,
        fmt::format("the parent of process {} ({}) ended during the dump, and the image "
                    "lacks the process",
                    member.process.pid().value, member.process.info().comm),
        fmt::format("dump process {} and the rest each by itself", member.process.pid().value));
  }
  return records;
}

Result<void> refuse_descriptors_under_way(const UniqueFd& criu_dir, const CriuOptions& options) {
  const bool lead_out = options.ext_unix_sk || !options.external.empty();
  const std::string what = descriptor_under_way(criu_dir, !lead_out);
  if (what.empty()) return {};
  return fail(ErrorCode::kBusy,
              fmt::format("{} is under way in a unix socket (SCM_RIGHTS), open in no process, "
                          "and CRIU cannot restore it so",
                          what),
              "dump it again when the program has received it");
}

Result<void> refuse_lost_tiles(const UniqueFd& criu_dir,
                               const std::vector<ProcessRecord>& processes) {
  std::vector<std::vector<Tid>> all(processes.size());
  share_out(all.size(),
            [&](std::size_t i) { all[i] = threads_with_tiles(criu_dir, processes[i].pid); });
  for (std::size_t i = 0; i < all.size(); ++i) {
    const ProcessRecord& process = processes[i];
    const std::vector<Tid>& threads = all[i];
    if (threads.empty()) continue;
    return fail(refusal(
        {"amx-tiles", Severity::kRed, process.pid,
         fmt::format("process {} was in the middle of a computation with AMX (thread {}), and "
                     "CRIU has taken its tiles from it: it computes something wrong, or ends by "
                     "SIGILL",
                     process.pid.value, threads.front().value),
         "start the program again, or restore it from an earlier image; with a criu that is "
         "linked dynamically, as Stasis has it, that does not happen"},
        ErrorCode::kCriuFailed));
  }
  return {};
}

Result<void> restart_calls_of(const UniqueFd& criu_dir,
                              const std::vector<ProcessRecord>& processes) {
  std::vector<Result<int>> all(processes.size());
  share_out(all.size(), [&](std::size_t i) { all[i] = restart_calls(criu_dir, processes[i].pid); });
  for (Result<int>& one : all)
    STASIS_TRY(std::move(one));
  return {};
}

std::vector<PhaseRecord> beside_of(const std::vector<TraceEvent>& spans,
                                   Clock::time_point beginning) {
  constexpr std::size_t kMostWork = 64;
  constexpr double kWorthTelling = 0.01;  // of the time until now
  constexpr std::string_view kOfCriu = "criu until ";
  const double least = kWorthTelling * since(beginning).count();
  std::vector<PhaseRecord> out;
  for (const TraceEvent& span : spans) {
    if (span.kind == TraceKind::kPhase || span.start < beginning) continue;
    std::string_view what = span.name;
    // The others of CRIU's are times when it waits for us.
    if (span.kind == TraceKind::kCriu) {
      if (!what.starts_with(kOfCriu)) continue;
      what.remove_prefix(kOfCriu.size());
    }
    const double seconds = Seconds(span.end - span.start).count();
    if (seconds < least) continue;
    std::string name = fmt::format("{}: {}", trace_kind_name(span.kind), what);
    if (span.target.value != 0) name += fmt::format(" {}", span.target.value);
    out.push_back({std::move(name), seconds, Seconds(span.start - beginning).count()});
  }
  std::sort(out.begin(), out.end(),
            [](const PhaseRecord& a, const PhaseRecord& b) { return a.seconds > b.seconds; });
  if (out.size() > kMostWork) out.resize(kMostWork);
  std::sort(out.begin(), out.end(),
            [](const PhaseRecord& a, const PhaseRecord& b) { return a.begins < b.begins; });
  return out;
}

}  // namespace stasis
