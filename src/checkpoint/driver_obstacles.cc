#include "checkpoint/driver_obstacles.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/listing.h"
#include "base/printable.h"
#include "proc/descriptors.h"

namespace stasis {
namespace {

using proc::ProcessInfo;
using proc::ProcFs;

// Managed memory is mapped from the driver's file for it at addresses as mmap gives them. One such
// mapping every CUDA process has, at a low address of the driver's choice (0x204a00000, 2 MiB,
// driver 580.159.04).
constexpr std::string_view kManagedFile = "nvidia-uvm";
constexpr std::uint64_t kDriversOwnAddresses = 1ULL << 40;

// While NCCL has a communicator whose memory can be shared (cuMem, its default), each of its ranks
// listens on an abstract socket of this name, followed by rank and a random number (2.28).
constexpr std::string_view kNcclSocket = "@tmp/nccl-socket-";
constexpr std::string_view kNcclLibrary = "libnccl.so";

// The kernel's names of processes have 15 characters: nvidia-cuda-mps-control and -server.
constexpr std::string_view kMpsComm = "nvidia-cuda-mps";
constexpr std::string_view kMpsDirectory = "/tmp/nvidia-mps";

// Libraries that compute-sanitizer (CUDA 13.0) and Nsight Compute (2025.3) have loaded by the
// program that they look into; driver 580.159.04 answers 801 to its lock. cuda-gdb traces it, and
// CUPTI, for which the driver's answer is the same, is mapped by programs that only might use it.
constexpr std::pair<std::string_view, std::string_view> kToolLibraries[] = {
    {"libsanitizer-collection.so", "compute-sanitizer"},
    {"libcuda-injection.so", "Nsight Compute"},
};

class Environment {
 public:
  explicit Environment(std::vector<std::string> variables) : variables_(std::move(variables)) {}

  std::string_view operator[](std::string_view name) const {
    for (const std::string_view variable : variables_) {
      if (variable.size() > name.size() && variable.starts_with(name) &&
          variable[name.size()] == '=') {
        return variable.substr(name.size() + 1);
      }
    }
    return {};
  }

 private:
  std::vector<std::string> variables_;
};

// The driver opens its files anew at a restore, and so does the agent what it takes back: without a
// spare number neither can, and the program would be suspended for ever. On the simulated driver
// two are enough; the rest is for files that the program opens on its way.
constexpr std::uint64_t kSpareDescriptors = 8;

std::string_view last_part(std::string_view path) {
  const std::size_t at = path.find_last_of("/:");
  return at == std::string_view::npos ? path : path.substr(at + 1);
}

bool is_managed_memory(const proc::Mapping& mapping) {
  std::string_view path = mapping.path;
  if (path.ends_with(" (deleted)")) path.remove_suffix(10);
  return mapping.start >= kDriversOwnAddresses && mapping.permissions.ends_with('s') &&
         last_part(path) == kManagedFile;
}

bool maps_library(const std::vector<proc::Mapping>& mappings, std::string_view name) {
  return std::any_of(mappings.begin(), mappings.end(), [&](const proc::Mapping& mapping) {
    return last_part(mapping.path).starts_with(name);
  });
}

// Transports that survive on driver 580: sockets, and shared memory of the old kind (measured with
// NCCL 2.28, two ranks on a host). P2P, and shared memory from cuMem, are lost at the restore.
bool transports_survive(const Environment& environment) {
  const std::string_view level = environment["NCCL_P2P_LEVEL"];
  const bool p2p = environment["NCCL_P2P_DISABLE"] != "1" && level != "LOC" && level != "0";
  const bool shared = environment["NCCL_SHM_DISABLE"] != "1" &&
                      environment["NCCL_CUMEM_HOST_ENABLE"] != "0" &&
                      environment["NCCL_CUMEM_ENABLE"] != "0";
  return !p2p && !shared;
}

}  // namespace

Result<bool> has_nccl_peers(const ProcFs& procfs, Pid pid) {
  STASIS_TRY_ASSIGN(auto sockets, procfs.unix_sockets(pid, kNcclSocket));
  std::erase_if(sockets, [](const proc::UnixSocket& socket) {
    return !socket.path.starts_with(kNcclSocket);
  });
  if (sockets.empty()) return false;
  STASIS_TRY_ASSIGN(auto own, procfs.socket_inodes(pid));
  const auto mine = std::count_if(sockets.begin(), sockets.end(), [&](const auto& socket) {
    return std::find(own.begin(), own.end(), socket.inode) != own.end();
  });
  return mine > 0 && static_cast<std::size_t>(mine) < sockets.size();
}

namespace {

class Search {
 public:
  Search(Driver& driver, const ProcFs& procfs) : driver_(driver), procfs_(procfs) {}

  Result<std::vector<Obstacle>> run(std::span<const ProcessInfo> processes) {
    for (const ProcessInfo& info : processes) {
      auto done = probe(info);
      if (!done && done.error().code != ErrorCode::kNoSuchProcess) {
        return fail(
            std::move(done.error())
                .within(fmt::format("looking for what would stop a checkpoint of process {}",
                                    info.pid.value)));
      }
    }
    // Handles of the old kind leave no sign but that the ranks are there.
    if (without_cumem_.size() > 1) {
      for (const Pid pid : without_cumem_)
        add_nccl(pid);
    }
    find_ranks_on_one_gpu();
    return std::move(found_);
  }

 private:
  void add(ObstacleId id, Pid pid, std::string what, std::string remedy) {
    found_.push_back(
        {id, Severity::kRed, pid, std::move(what), std::move(remedy), Override::kIgnoreObstacles});
  }

  void add_nccl(Pid pid) {
    add("nccl", pid,
        "GPU memory shared with other processes through NCCL, which the driver checkpoints and "
        "cannot restore (the job would be lost)",
        "start all ranks with NCCL_P2P_DISABLE=1 and NCCL_CUMEM_HOST_ENABLE=0 (or "
        "NCCL_SHM_DISABLE=1) in their environment");
  }

  Result<void> probe(const ProcessInfo& info) {
    const Pid pid = info.pid;
    STASIS_TRY_ASSIGN(auto mappings, procfs_.mappings(pid));
    STASIS_TRY_ASSIGN(auto variables, procfs_.environment(pid));
    const Environment environment(std::move(variables));
    if (managed_bytes(mappings) > 0) {
      add("managed-memory", pid, "managed memory, which the driver refuses to checkpoint",
          "start it with `stasis run`, whose agent gives it up and takes it again (not "
          "__managed__ variables), or use memory from cudaMalloc");
    }
    for (const auto& [library, tool] : kToolLibraries) {
      if (!maps_library(mappings, library)) continue;
      add("gpu-tool", pid,
          fmt::format("a program that {} is at work in, which the driver does not lock", tool),
          fmt::format("start it without {}", tool));
    }
    if (has_strict_thread(pid)) {
      add("seccomp-strict", pid,
          "a thread in seccomp's strict mode, which the kernel ends when it is kept "
          "still",
          "suspend or dump it before or after it has such a thread");
    }
    const auto descriptors = proc::descriptor_limit(pid);
    if (descriptors && descriptors->spare < kSpareDescriptors) {
      add("descriptors", pid,
          fmt::format("{} spare descriptor(s) of the {} that it may have, without which its GPU "
                      "memory cannot be brought back (it takes up to {})",
                      descriptors->spare, descriptors->limit, kSpareDescriptors),
          fmt::format("raise its limit of open files ({})",
                      proc::raise_command(pid, *descriptors)));
    }
    if (!transports_survive(environment)) {
      STASIS_TRY_ASSIGN(auto peers, has_nccl_peers(procfs_, pid));
      if (peers) {
        add_nccl(pid);
      } else if (environment["NCCL_CUMEM_ENABLE"] == "0" && maps_library(mappings, kNcclLibrary)) {
        without_cumem_.push_back(pid);
      }
    }
    if (maps_library(mappings, kNcclLibrary))
      ranks_.push_back({pid, std::string(environment["NCCL_HOSTID"])});
    STASIS_TRY_ASSIGN(auto under_mps, is_mps_client(info, environment));
    if (under_mps) {
      add("mps", pid,
          "a program under MPS (nvidia-cuda-mps-control), which the driver "
          "cannot checkpoint",
          "start it without MPS");
    }
    if (environment["CUDA_VISIBLE_DEVICES"].starts_with("MIG-") || uses_mig(pid)) {
      add("mig", pid, "a part of a GPU (MIG), which the driver cannot checkpoint",
          "run it on a GPU without MIG");
    }
    return {};
  }

  // NCCL refuses ranks that share a GPU, unless each is said to be on a host of its own. They wait
  // for each other in their kernels, and a GPU cannot be switched away from a kernel of a program
  // that the driver has restored (docs/results/2026-11-23-restored-kernels.md).
  void find_ranks_on_one_gpu() {
    if (ranks_.size() < 2) return;
    const auto use = driver_.memory_by_process();
    if (!use) return;
    std::map<GpuUuid, std::vector<const Rank*>> by_gpu;
    for (const Rank& rank : ranks_) {
      if (rank.host.empty()) continue;
      if (const auto it = use->find(rank.pid); it != use->end())
        for (const GpuUse& one : it->second)
          by_gpu[one.gpu].push_back(&rank);
    }
    std::set<Pid> told;
    for (const auto& [gpu, ranks] : by_gpu) {
      for (const Rank* rank : ranks) {
        const bool shares = std::any_of(ranks.begin(), ranks.end(), [&](const Rank* other) {
          return other->pid != rank->pid && other->host != rank->host;
        });
        if (!shares || !told.insert(rank->pid).second) continue;
        add("ranks-share-gpu", rank->pid,
            "a rank of NCCL that shares its GPU with another one (NCCL_HOSTID): once resumed they "
            "would wait for each other in their kernels for ever (the job would be lost)",
            "give each rank a GPU of its own");
      }
    }
  }

  // It may make no call but read, write, exit and sigreturn; a thread that is kept still waits in
  // futex(2).
  bool has_strict_thread(Pid pid) const {
    constexpr int kStrict = 1;
    const auto threads = procfs_.threads(pid);
    return std::any_of(threads.begin(), threads.end(), [&](Tid thread) {
      const auto status = procfs_.thread_status(pid, thread);
      return status && status->seccomp == kStrict;
    });
  }

  // Programs that start while the control daemon of their pipe directory runs become its clients.
  Result<bool> is_mps_client(const ProcessInfo& info, const Environment& environment) {
    STASIS_TRY_ASSIGN(auto details, procfs_.details(info.pid));
    if (!daemons_) {
      STASIS_TRY_ASSIGN(auto all, procfs_.all());
      daemons_.emplace();
      for (const ProcessInfo& other : all) {
        if (!std::string_view(other.comm).starts_with(kMpsComm) || other.has_ended()) continue;
        auto owner = procfs_.details(other.pid);
        if (!owner) continue;
        auto variables = procfs_.environment(other.pid);
        daemons_->push_back({other.start_ticks, owner->uid,
                             pipe_directory(Environment(variables ? std::move(*variables)
                                                                  : std::vector<std::string>()))});
      }
    }
    const std::string mine = pipe_directory(environment);
    return std::any_of(daemons_->begin(), daemons_->end(), [&](const Daemon& daemon) {
      // A user who may name a process so must not keep the programs of others from being saved.
      return daemon.since <= info.start_ticks && daemon.directory == mine &&
             (daemon.uid == 0 || daemon.uid == details.uid);
    });
  }

  static std::string pipe_directory(const Environment& environment) {
    const std::string_view set = environment["CUDA_MPS_PIPE_DIRECTORY"];
    return std::string(set.empty() ? kMpsDirectory : set);
  }

  bool uses_mig(Pid pid) {
    if (!mig_) {
      mig_.emplace();
      auto gpus = driver_.gpus();
      if (gpus) {
        for (const Gpu& gpu : *gpus) {
          if (gpu.mig) mig_->push_back(gpu.uuid);
        }
      }
    }
    if (mig_->empty()) return false;
    auto use = driver_.memory_by_process();
    if (!use) return false;
    const auto it = use->find(pid);
    return it != use->end() &&
           std::any_of(it->second.begin(), it->second.end(), [&](const GpuUse& part) {
             return std::find(mig_->begin(), mig_->end(), part.gpu) != mig_->end();
           });
  }

  struct Daemon {
    std::uint64_t since;
    unsigned uid;
    std::string directory;
  };

  Driver& driver_;
  const ProcFs& procfs_;
  std::vector<Obstacle> found_;
  std::vector<Pid> without_cumem_;
  struct Rank {
    Pid pid;
    std::string host;  // NCCL_HOSTID
  };
  std::vector<Rank> ranks_;
  std::optional<std::vector<Daemon>> daemons_;
  std::optional<std::vector<GpuUuid>> mig_;
};

}  // namespace

Result<std::vector<Obstacle>> find_obstacles(Driver& driver, const ProcFs& procfs,
                                             std::span<const ProcessInfo> processes) {
  return Search(driver, procfs).run(processes);
}

Result<std::vector<Obstacle>> find_rdma(const ProcFs& procfs,
                                        std::span<const ProcessInfo> processes) {
  constexpr std::string_view kVerbs = "/dev/infiniband/uverbs";
  std::vector<Obstacle> found;
  for (const ProcessInfo& info : processes) {
    std::string device;
    auto files = procfs.open_files(info.pid);
    if (!files && files.error().code == ErrorCode::kNoSuchProcess) continue;
    STASIS_TRY(files);
    for (const proc::OpenFile& file : *files)
      if (device.empty() && file.path.starts_with(kVerbs)) device = file.path;
    auto mappings = procfs.mappings(info.pid);
    if (!mappings && mappings.error().code == ErrorCode::kNoSuchProcess) continue;
    STASIS_TRY(mappings);
    for (const proc::Mapping& mapping : *mappings)
      if (device.empty() && mapping.path.starts_with(kVerbs)) device = mapping.path;
    if (device.empty()) continue;
    found.push_back({"rdma", Severity::kRed, info.pid,
                     fmt::format("an RDMA device ({}), by which a network adapter may read and "
                                 "write its memory while it stands still",
                                 printable(device)),
                     "start all ranks with NCCL_IB_DISABLE=1 in their environment, so that NCCL "
                     "uses sockets",
                     Override::kIgnoreObstacles});
  }
  return found;
}

std::uint64_t managed_bytes(std::span<const proc::Mapping> mappings) {
  std::uint64_t bytes = 0;
  for (const proc::Mapping& mapping : mappings)
    if (is_managed_memory(mapping)) bytes += mapping.end - mapping.start;
  return bytes;
}

Error describe_obstacles(std::span<const Obstacle> found,
                         std::span<const proc::ProcessInfo> processes) {
  constexpr std::size_t kShown = 8;
  std::map<std::string, std::vector<std::string>> concerned;  // by what is in their way
  std::set<std::string> remedies;
  for (const Obstacle& obstacle : found) {
    const auto info =
        std::find_if(processes.begin(), processes.end(),
                     [&](const proc::ProcessInfo& one) { return one.pid == obstacle.pid; });
    concerned[obstacle.what].push_back(
        fmt::format("{} ({})", obstacle.pid.value, info == processes.end() ? "?" : info->comm));
    remedies.insert(obstacle.remedy);
  }
  std::vector<std::string> reasons;
  for (const auto& [what, list] : concerned)
    reasons.push_back(fmt::format("{}: process {}", what, listed(list, ", ", kShown)));
  Error error{ErrorCode::kNotSupported, listed(reasons),
              fmt::format("{}", fmt::join(remedies, "; "))};
  error.obstacles.assign(found.begin(), found.end());
  return error;
}

}  // namespace stasis
