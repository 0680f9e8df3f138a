#include "operations/neighbours.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/listing.h"
#include "base/printable.h"
#include "direct/agent_client.h"

namespace stasis {

void tell_of_neighbours(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                        std::set<GpuUuid> gpus) {
  const auto use = env.driver.memory_by_process();
  if (!use) return;
  std::set<Pid> own;
  for (const proc::ProcessInfo& info : ours) {
    own.insert(info.pid);
    if (const auto at = use->find(info.pid); at != use->end())
      for (const GpuUse& one : at->second)
        gpus.insert(one.gpu);
  }
  std::vector<std::string> who;
  for (const auto& [pid, uses] : *use) {
    const bool beside = !own.contains(pid) &&
                        std::any_of(uses.begin(), uses.end(),
                                    [&](const GpuUse& one) { return gpus.contains(one.gpu); });
    if (!beside) continue;
    const auto agent = direct::AgentClient::probe(pid);
    if (!agent || !*agent || !(*agent)->of_our_version || !(*agent)->held_before) continue;
    if (direct::is_away((*agent)->state)) continue;
    const auto info = proc::ProcFs().process(pid);
    if (info) who.push_back(fmt::format("{} ({})", pid.value, printable(info->comm)));
  }
  if (who.empty()) return;
  env.tell(fmt::format(
      "on the same GPU runs a program that was suspended or restored before: process {}; "
      "a kernel of it that takes more than some 4 s meanwhile is lost with it (Xid 109): "
      "suspend it first if it has such",
      listed(who, ", ")));
}

std::set<GpuUuid> targets_of(std::span<const GpuUse> needed, std::span<const GpuPair> pairs) {
  std::set<GpuUuid> gpus;
  for (const GpuUse& use : needed)
    gpus.insert(target_of(use.gpu, pairs));
  return gpus;
}

}  // namespace stasis
