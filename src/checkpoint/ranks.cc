#include "checkpoint/ranks.h"

#include <unistd.h>

#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/listing.h"

namespace stasis {
namespace {

constexpr int kGenerations = 64;

// The process and those above it; a shell that has started both the tool and the job is above no
// ranks.
std::set<Pid> with_ancestors(const proc::ProcFs& procfs, Pid pid) {
  std::set<Pid> out;
  for (int i = 0; i < kGenerations && pid.value > 1; ++i) {
    out.insert(pid);
    const auto info = procfs.process(pid);
    if (!info) break;
    pid = info->parent;
  }
  return out;
}

}  // namespace

std::optional<OtherRanks> find_other_ranks(const proc::ProcFs& procfs, Pid root) {
  const auto tree = procfs.tree(root);
  if (!tree) return std::nullopt;
  std::set<Pid> known;
  for (const proc::ProcessInfo& info : *tree)
    known.insert(info.pid);
  const std::set<Pid> ours = with_ancestors(procfs, Pid{::getpid()});
  Pid next = tree->front().parent;
  for (int i = 0; i < kGenerations && next.value > 1 && !ours.contains(next); ++i) {
    const auto wider = procfs.tree(next);
    if (!wider) return std::nullopt;
    OtherRanks out{wider->front(), {}};
    for (const proc::ProcessInfo& info : *wider) {
      if (!known.insert(info.pid).second) continue;
      const auto uses = procfs.maps_file(info.pid, "libcuda.so");
      if (uses && *uses) out.others.push_back(info.pid);
    }
    if (!out.others.empty()) return out;
    next = out.above.parent;
  }
  return std::nullopt;
}

std::string describe_other_ranks(const OtherRanks& ranks) {
  constexpr std::size_t kShown = 8;
  std::vector<std::string> others;
  for (const Pid pid : ranks.others)
    others.push_back(std::to_string(pid.value));
  return fmt::format(
      "if it works together with other processes ({} use CUDA, too), name process {} ({}), which "
      "is above all of them, so that they are locked together",
      listed(others, ", ", kShown), ranks.above.pid.value, ranks.above.comm);
}

}  // namespace stasis
