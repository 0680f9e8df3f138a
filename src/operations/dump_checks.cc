#include "operations/dump_checks.h"

#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/listing.h"
#include "checkpoint/ranks.h"
#include "doctor/criu_obstacles.h"
#include "driver/gpu_plan.h"

namespace stasis {

namespace {

// Bytes free for this user on the file system that holds `fd`; nothing if it does not say (ramfs, a
// tmpfs without a limit: no blocks at all).
std::optional<std::uint64_t> free_space(const UniqueFd& fd) {
  struct statvfs info {};
  if (::fstatvfs(fd.get(), &info) != 0 || info.f_blocks == 0) return std::nullopt;
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

// Whether what was written is to be had again until a later run syncs it, whatever becomes of the
// disk: room is set aside at the write, and pages that could not be brought to the disk stay in the
// page cache as they are. A network file system finds out at the sync, btrfs drops them, and what
// lies below an overlay is not to be seen.
bool keeps_what_it_has_taken(const UniqueFd& dir) {
  struct statfs info = {};
  if (::fstatfs(dir.get(), &info) != 0) return false;
  const auto type = static_cast<std::uint32_t>(info.f_type);
  constexpr std::array kKnown{std::uint32_t{EXT4_SUPER_MAGIC}, std::uint32_t{XFS_SUPER_MAGIC},
                              std::uint32_t{TMPFS_MAGIC}};
  return std::find(kKnown.begin(), kKnown.end(), type) != kKnown.end();
}

}  // namespace

Result<ImageNeeds> check_disk_space(const ProcessTree& tree, const UniqueFd& dir,
                                    const std::string& path, const ContentBase* base,
                                    bool zeros_are_left_out) {
  const proc::ProcFs procfs;
  std::uint64_t on_host = 0;
  for (const TreeMember& member : tree.members()) {
    if (auto bytes = procfs.anonymous_bytes(member.process.pid())) on_host += *bytes;
  }
  std::uint64_t on_gpus = 0;
  if (auto use = tree.members_use()) {
    for (const TreeMember& member : tree.members()) {
      if (member.initial != CudaState::kRunning && member.initial != CudaState::kLocked) continue;
      const auto it = use->find(member.process.pid());
      const std::uint64_t bytes = it == use->end() ? 0 : total_bytes(it->second);
      on_gpus += bytes - std::min(bytes, kContextBytes);
    }
  }
  const std::uint64_t in_base = base != nullptr ? base->usable_bytes() : 0;
  const std::uint64_t needed = on_host + on_gpus - std::min(on_host + on_gpus, in_base);
  const auto free = free_space(dir);
  if (!free || *free >= needed) return ImageNeeds{needed};
  Error refusal{ErrorCode::kNoSpace,
                fmt::format("the image needs about {} and {} has {} free", format_bytes(needed),
                            path, format_bytes(*free)),
                "free some space, or choose a directory on another file system"};
  if (!zeros_are_left_out || on_host > *free + in_base) return fail(std::move(refusal));
  return ImageNeeds{needed, ImageRoom{on_gpus, *free + in_base - on_host, std::move(refusal)}};
}

namespace {

// Ranks that wait for each other need not show it: the driver may lock one at once, and the others
// miss it later.
void tell_of_other_ranks(const Environment& env, Pid root) {
  const auto others = find_other_ranks(proc::ProcFs(), root);
  if (others) env.tell(describe_other_ranks(*others));
}

}  // namespace

Result<void> refuse_undumpable(const Environment& env, const std::vector<TreeMember>& members,
                               const CriuOptions& criu, const DumpOptions& options) {
  const auto& job = options.job;
  const std::vector<std::string> connected = job ? job->streams : std::vector<std::string>();
  // CRIU gives a file that has lost its name another one, and takes that away when the tree runs
  // on: no restore would find the file. What a job has in its /dev/shm is in the image besides.
  CriuOptions wanted = criu;
  if (!members.empty()) tell_of_other_ranks(env, members.front().process.pid());
  const bool lost = options.after == AfterDump::kRunning && criu.link_remap && !job;
  if (lost) wanted.link_remap = false;
  std::vector<std::string> reasons;
  std::set<std::string> remedies;
  std::vector<Obstacle> obstacles;
  bool may_ignore = true;
  auto found = find_undumpable(proc::ProcFs(), members, wanted, env.driver.info().simulated,
                               connected, env.interrupt);
  STASIS_TRY(env.interrupt.check());
  for (Obstacle& obstacle : found) {
    if (obstacle.id.is_told()) env.tell(obstacle.what);
    if (obstacle.severity != Severity::kRed) continue;
    if (lost && obstacle.id == "link-remap") {
      obstacle.remedy =
          "dump it without --leave-running, by which the file would be lost to the image, or "
          "start it under `stasis run --images-dir`, which saves its /dev/shm";
    }
    if (obstacle.by == Override::kNone) may_ignore = false;
    reasons.push_back(obstacle.what);
    remedies.insert(obstacle.remedy);
    obstacles.push_back(std::move(obstacle));
  }
  if (reasons.empty()) return {};
  if (options.ignore_undumpable && may_ignore) {
    for (const std::string& reason : reasons)
      env.tell(reason);
    return {};
  }
  Error error{ErrorCode::kUndumpable, listed(reasons), fmt::to_string(fmt::join(remedies, "; "))};
  if (may_ignore)
    error.remedy +=
        fmt::format("; to let CRIU try all the same: {}", option_of(Override::kIgnoreUndumpable));
  if (std::all_of(obstacles.begin(), obstacles.end(), passes_by_itself)) {
    error.code = ErrorCode::kBusy;
    error.retry = Retry::kSame;
  }
  error.obstacles = std::move(obstacles);
  return fail(std::move(error));
}

Result<void> refuse_held(const Environment& env, const std::vector<TreeMember>& members,
                         proc::HeldFiles& files) {
  std::vector<proc::ProcessInfo> processes;
  for (const TreeMember& member : members)
    processes.push_back(member.process.info());
  auto held = find_held_files(proc::ProcFs(), processes, files, env.interrupt);
  if (held.empty()) return {};
  return fail(refusal(std::move(held.front()), ErrorCode::kUndumpable));
}

bool may_deduplicate(const Environment& env, const DumpOptions& options) {
  return options.base && env.mover && options.path != MemoryPath::kDriver &&
         options.after != AfterDump::kSuspended;
}

namespace {

void tell_of_damage(const Environment& env, const std::string& path, const ContentBase& base) {
  for (const Error& damage : base.damage()) {
    env.tell(fmt::format("{} is damaged, and what is in that file is written anew: {}", path,
                         damage.message));
  }
}

}  // namespace

Result<std::shared_ptr<const ContentBase>> open_base(const Environment& env,
                                                     const DumpOptions& options) {
  if (!may_deduplicate(env, options)) return nullptr;
  auto base = ContentBase::open(*options.base, env.progress, env.interrupt);
  if (!base && base.error().code == ErrorCode::kInterrupted) return base;
  if (!base) {
    if (base.error().code != ErrorCode::kNotSupported || !options.base_may_be_empty) {
      env.tell(fmt::format("all GPU memory is written, and none of it deduplicated against {}: {}",
                           *options.base, base.error().to_string()));
    }
    return nullptr;
  }
  tell_of_damage(env, *options.base, **base);
  return base;
}

// A base without host memory in host/ is no fault of it: there may have been little.
Result<std::shared_ptr<const ContentBase>> open_host_base(const Environment& env,
                                                          const DumpOptions& options) {
  if (!options.base || options.host_memory == HostMemoryWay::kCriu ||
      options.after == AfterDump::kSuspended)
    return nullptr;
  auto base = ContentBase::open(*options.base, env.progress, env.interrupt, kContentChunk,
                                ContentKind::kHost);
  if (!base && base.error().code == ErrorCode::kInterrupted) return base;
  if (!base && base.error().code != ErrorCode::kNotSupported) {
    env.tell(fmt::format("all host memory is written, and none of it deduplicated against {}: {}",
                         *options.base, base.error().to_string()));
  }
  if (!base) return nullptr;
  tell_of_damage(env, *options.base, **base);
  return base;
}

bool past_the_cache(const DumpOptions& options) {
  return options.direct_io.value_or(options.sync == SyncPolicy::kDisk &&
                                    options.after == AfterDump::kKill);
}

SyncPolicy when_to_sync(const DumpOptions& options, const ImageWriter& writer) {
  const bool later = options.sync == SyncPolicy::kDisk && options.after == AfterDump::kRunning &&
                     !options.direct_io.value_or(false) && !writer.replaces() &&
                     keeps_what_it_has_taken(writer.dir());
  return later ? SyncPolicy::kDeferred : options.sync;
}

Result<void> refuse_from_within(Pid root) {
  STASIS_TRY_ASSIGN(auto infos, proc::ProcFs().tree(root));
  if (std::none_of(infos.begin(), infos.end(),
                   [](const proc::ProcessInfo& info) { return info.pid.value == ::getpid(); })) {
    return {};
  }
  return fail(
      ErrorCode::kUsage,
      root.value == ::getpid()
          ? fmt::format("process {} cannot be dumped from within: it is this one", root.value)
          : fmt::format("process {} cannot be dumped from within: this one ({}) is below it",
                        root.value, ::getpid()),
      "do it from outside of its tree: in another shell, or in a program that `setsid "
      "--fork` starts");
}

}  // namespace stasis
