#include "operations/common.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

namespace stasis::operations {

std::vector<JournalTarget> journal_targets(const std::vector<GroupMember>& members) {
  std::vector<JournalTarget> targets;
  for (const GroupMember& member : members) {
    if (!member.initial) continue;
    targets.push_back({member.process.pid(), member.process.info().start_ticks, *member.initial});
  }
  return targets;
}

Result<OpenedGroup> open_group(const Environment& env, const std::string& operation, Pid root,
                               const std::string& image) {
  auto group = Group::open(env.driver, root);
  if (!group) return fail(std::move(group.error()));
  if (group->cuda_count() == 0) {
    group->dismiss();
    const std::size_t others = group->members().size() - 1;
    return fail(ErrorCode::kNotCuda,
                others == 0 ? fmt::format("process {} does not use CUDA", root.value)
                            : fmt::format("neither process {} nor any of the {} below it uses CUDA",
                                          root.value, others),
                "`stasis ps` lists the processes that use CUDA");
  }
  auto journal = Journal::begin({operation, root, Pid{}, image, {}});
  if (!journal) {
    group->dismiss();
    return fail(std::move(journal.error()));
  }
  OpenedGroup opened{std::make_unique<Journal>(std::move(*journal)), std::move(*group)};
  Journal* record = opened.journal.get();
  opened.group.on_members_changed = [record](const std::vector<GroupMember>& members) {
    return record->update(journal_targets(members));
  };
  if (auto written = record->update(journal_targets(opened.group.members())); !written) {
    opened.group.dismiss();
    record->finish();
    return fail(std::move(written.error()));
  }
  return opened;
}

Error roll_back(OpenedGroup& opened, Error why) {
  auto back = opened.group.roll_back();
  if (back) {
    opened.journal->finish();
    return why;
  }
  Error both = std::move(back.error());
  both.message = fmt::format("{}; and then {}", why.message, both.message);
  if (!why.remedy.empty()) both.remedy += "; the first failure: " + why.remedy;
  both.driver = why.driver;
  return both;
}

std::vector<ProcessReport> report_processes(const Group& group) {
  std::vector<ProcessReport> out;
  for (const GroupMember& member : group.members()) {
    ProcessReport report{member.process.pid(), member.process.info().comm, std::nullopt, 0};
    if (member.initial) {
      if (auto state = member.process.cuda_state()) report.state = *state;
    }
    if (auto use = group.gpu_use().find(report.pid); use != group.gpu_use().end()) {
      for (const GpuUse& part : use->second)
        report.gpu_bytes += part.bytes;
    }
    out.push_back(std::move(report));
  }
  return out;
}

Result<void> verify_states(const Group& group, CudaState wanted) {
  for (const GroupMember& member : group.members()) {
    if (!member.initial || !member.process.alive()) continue;
    auto state = member.process.state();
    if (!state) {
      if (!member.process.alive()) continue;
      return fail(std::move(state.error()));
    }
    if (*state == wanted) continue;
    return fail(ErrorCode::kWrongState,
                fmt::format("process {} is {} and should be {}", member.process.pid().value,
                            cuda_state_name(*state), cuda_state_name(wanted)),
                "another tool acts on it; wait for it to end");
  }
  return {};
}

Result<std::vector<GpuPair>> plan_gpu_map(Driver& driver, std::span<const GpuMapEntry> entries,
                                          std::span<const Gpu> from, std::span<const Gpu> to) {
  auto pairs = complete_gpu_map(entries, from, to);
  if (!pairs) return fail(std::move(pairs.error()));
  const bool identity =
      std::all_of(pairs->begin(), pairs->end(), [](const GpuPair& p) { return p.from == p.to; });
  if (identity) return std::vector<GpuPair>();
  if (!driver.info().has_device_map) {
    return fail(ErrorCode::kDeviceMapUnsupported,
                fmt::format("this driver ({}) cannot move a process to other GPUs",
                            driver.info().driver_version),
                "install driver 580 or newer, or restore on the GPUs the process was on");
  }
  return pairs;
}

Result<void> check_gpu_memory(std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                              std::span<const Gpu> gpus) {
  std::map<GpuUuid, std::uint64_t> sums;
  for (const GpuUse& use : needed) {
    GpuUuid target = use.gpu;
    for (const GpuPair& pair : pairs) {
      if (pair.from == use.gpu) target = pair.to;
    }
    sums[target] += use.bytes;
  }
  for (const auto& [uuid, bytes] : sums) {
    const auto gpu =
        std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& g) { return g.uuid == uuid; });
    if (gpu == gpus.end()) {
      return fail(ErrorCode::kGpuMismatch,
                  fmt::format("{} is not in this machine", uuid.to_string()),
                  "name the GPU to use instead with --device-map OLD=NEW");
    }
    const std::uint64_t free = gpu->memory_total - std::min(gpu->memory_total, gpu->memory_used);
    if (bytes > free) {
      return fail(ErrorCode::kOutOfGpuMemory,
                  fmt::format("{} ({}) has {} of memory free, and {} is needed", uuid.to_string(),
                              gpu->name, format_bytes(free), format_bytes(bytes)),
                  "free GPU memory, or choose another GPU with --device-map OLD=NEW");
    }
  }
  return {};
}

}  // namespace stasis::operations
