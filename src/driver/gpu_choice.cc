#include "driver/gpu_choice.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "base/units.h"
#include "driver/gpu_map.h"

namespace stasis {
namespace {

bool same_kind(const Gpu& a, const Gpu& b) {
  return a.name == b.name && a.memory_total == b.memory_total;
}

std::uint64_t free_of(const Gpu& gpu) {
  return gpu.memory_total - std::min(gpu.memory_total, gpu.memory_used);
}

// A GPU of the job that needs a place, and what it needs there.
struct Wanted {
  std::size_t from = 0;
  std::uint64_t bytes = 0;
};

// Finds places for all at once (augmenting paths), because the first that fits may be the only one
// for another.
class Matching {
 public:
  Matching(std::span<const Wanted> wanted, std::span<const Gpu> from, std::span<const Gpu> to,
           const std::vector<bool>& allotted, bool probe_memory)
      : wanted_(wanted),
        from_(from),
        to_(to),
        allotted_(allotted),
        probe_memory_(probe_memory),
        user_of_(to.size()) {}

  bool find() {
    // A GPU that can stay stays.
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      for (std::size_t j = 0; j < to_.size(); ++j) {
        if (to_[j].uuid == from_[wanted_[i].from].uuid && fits(i, j)) user_of_[j] = i;
      }
    }
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      if (std::find(user_of_.begin(), user_of_.end(), i) != user_of_.end()) continue;
      std::vector<bool> seen(to_.size(), false);
      if (!place(i, seen)) return false;
    }
    return true;
  }

  // Which of those wanted has the place; nothing if none has.
  std::optional<std::size_t> user_of(std::size_t place) const { return user_of_[place]; }

 private:
  bool fits(std::size_t i, std::size_t j) const {
    return allotted_[j] && same_kind(from_[wanted_[i].from], to_[j]) &&
           (!probe_memory_ || wanted_[i].bytes <= free_of(to_[j]));
  }
  bool place(std::size_t i, std::vector<bool>& seen) {
    for (std::size_t j = 0; j < to_.size(); ++j) {
      if (seen[j] || !fits(i, j)) continue;
      seen[j] = true;
      if (user_of_[j] && !place(*user_of_[j], seen)) continue;
      user_of_[j] = i;
      return true;
    }
    return false;
  }

  std::span<const Wanted> wanted_;
  std::span<const Gpu> from_;
  std::span<const Gpu> to_;
  const std::vector<bool>& allotted_;
  bool probe_memory_;
  std::vector<std::optional<std::size_t>> user_of_;
};

// "2 x H100 (80 GB)", by kind.
template <class Range, class ToGpu>
std::string kinds_of(const Range& range, const ToGpu& to_gpu) {
  std::map<std::string, int> kinds;
  for (std::size_t i = 0; i < range.size(); ++i) {
    if (const Gpu* gpu = to_gpu(i))
      ++kinds[fmt::format("{} ({})", gpu->name, format_bytes(gpu->memory_total))];
  }
  std::string out;
  for (const auto& [kind, count] : kinds)
    out += fmt::format("{}{} x {}", out.empty() ? "" : ", ", count, kind);
  return out.empty() ? "none" : out;
}

// The use of each GPU; all of them if nothing is known.
std::vector<Wanted> wanted_of(std::span<const GpuUse> needed, std::span<const Gpu> from) {
  std::vector<Wanted> out;
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::uint64_t bytes = 0;
    bool used = needed.empty();
    for (const GpuUse& use : needed) {
      if (!(use.gpu == from[i].uuid)) continue;
      used = true;
      bytes += use.bytes;
    }
    if (used) out.push_back({i, bytes});
  }
  return out;
}

Error out_of_memory(std::span<const Wanted> wanted, std::span<const Gpu> to,
                    const std::vector<bool>& allotted) {
  std::string need;
  for (const Wanted& one : wanted)
    need += (need.empty() ? "" : ", ") + format_bytes(one.bytes);
  std::string have;
  for (std::size_t j = 0; j < to.size(); ++j) {
    if (allotted[j])
      have += fmt::format("{}{} of {}", have.empty() ? "" : ", ", format_bytes(free_of(to[j])), j);
  }
  return {ErrorCode::kOutOfGpuMemory,
          fmt::format("the job needs {} of GPU memory, and the GPUs that it may have are too full: "
                      "free is {}",
                      need, have),
          "free GPU memory, or name other GPUs with OLD=NEW"};
}

}  // namespace

std::vector<GpuUuid> allotted_gpus(const std::optional<std::string>& visible,
                                   std::span<const Gpu> gpus) {
  std::vector<GpuUuid> out;
  if (!visible) {
    for (const Gpu& gpu : gpus)
      out.push_back(gpu.uuid);
    return out;
  }
  for (std::size_t begin = 0; begin < visible->size();) {
    const std::size_t end = std::min(visible->find(',', begin), visible->size());
    auto found = find_gpu(gpus, visible->substr(begin, end - begin));
    if (!found) break;
    out.push_back(*found);
    begin = end + 1;
  }
  return out;
}

Result<std::vector<GpuPair>> choose_gpu_map(std::span<const GpuUse> needed,
                                            std::span<const Gpu> from, std::span<const Gpu> to,
                                            std::span<const GpuUuid> allotted) {
  const std::vector<Wanted> wanted = wanted_of(needed, from);
  std::vector<bool> may(to.size(), needed.empty());
  for (std::size_t j = 0; j < to.size(); ++j) {
    if (std::find(allotted.begin(), allotted.end(), to[j].uuid) != allotted.end()) may[j] = true;
  }
  Matching matching(wanted, from, to, may, true);
  if (!matching.find()) {
    if (Matching(wanted, from, to, may, false).find()) return fail(out_of_memory(wanted, to, may));
    return fail(
        ErrorCode::kGpuMismatch,
        fmt::format("the job needs {}, and it may have {}",
                    kinds_of(wanted, [&](std::size_t i) { return &from[wanted[i].from]; }),
                    kinds_of(to, [&](std::size_t j) { return may[j] ? &to[j] : nullptr; })),
        "give it GPUs of that kind (CUDA_VISIBLE_DEVICES says which it may have); to try others: "
        "--device-map OLD=NEW");
  }
  if (from.size() != to.size()) {
    return fail(
        ErrorCode::kGpuMismatch,
        fmt::format("the job saw {} GPUs ({}), and there are {} here ({})", from.size(),
                    kinds_of(from, [&](std::size_t i) { return &from[i]; }), to.size(),
                    kinds_of(to, [&](std::size_t j) { return &to[j]; })),
        "the driver demands a one-to-one map of all GPUs that it sees: let the job see as many "
        "as before (a container, or the scheduler's device cgroup)");
  }
  // The rest by complete_gpu_map(), which knows how GPUs that no process uses are dealt out.
  std::vector<GpuMapEntry> entries;
  for (std::size_t j = 0; j < to.size(); ++j) {
    if (const auto user = matching.user_of(j))
      entries.push_back({from[wanted[*user].from].uuid.to_string(), to[j].uuid.to_string()});
  }
  return complete_gpu_map(entries, from, to);
}

}  // namespace stasis
