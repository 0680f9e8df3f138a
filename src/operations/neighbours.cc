#include "operations/neighbours.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/listing.h"
#include "base/printable.h"
#include "direct/agent_client.h"
#include "direct/mover_server.h"

namespace stasis {

namespace {

// Programs of other trees that run on these GPUs, as a message lists them.
struct Neighbours {
  std::vector<std::string> held_before;
  std::vector<std::string> others;
};

Neighbours neighbours(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                      std::set<GpuUuid> gpus) {
  Neighbours found;
  const auto use = env.driver.memory_by_process();
  if (!use) return found;
  std::set<Pid> own;
  for (const proc::ProcessInfo& info : ours) {
    own.insert(info.pid);
    if (const auto at = use->find(info.pid); at != use->end())
      for (const GpuUse& one : at->second)
        gpus.insert(one.gpu);
  }
  for (const auto& [pid, uses] : *use) {
    const bool beside = !own.contains(pid) &&
                        std::any_of(uses.begin(), uses.end(),
                                    [&](const GpuUse& one) { return gpus.contains(one.gpu); });
    if (!beside) continue;
    const auto info = proc::ProcFs().process(pid);
    if (!info || info->comm == direct::kMoverName) continue;
    const auto agent = direct::AgentClient::probe(pid);
    const bool known = agent && *agent && (*agent)->of_our_version;
    if (known && direct::is_away((*agent)->state)) continue;
    (known && (*agent)->held_before ? found.held_before : found.others)
        .push_back(fmt::format("{} ({})", pid.value, printable(info->comm)));
  }
  return found;
}

void tell_of_held(const Environment& env, const std::vector<std::string>& who) {
  if (who.empty()) return;
  env.tell(fmt::format(
      "on the same GPU runs a program that was suspended or restored before: process {}; "
      "a kernel of it that takes more than some 4 s meanwhile is lost with it (Xid 109): "
      "suspend it first if it has such",
      listed(who, ", ")));
}

}  // namespace

void tell_of_neighbours(const Environment& env, const std::vector<proc::ProcessInfo>& ours) {
  tell_of_held(env, neighbours(env, ours, {}).held_before);
}

void tell_of_neighbours_to_come(const Environment& env, const std::vector<proc::ProcessInfo>& ours,
                                std::set<GpuUuid> gpus) {
  const Neighbours found = neighbours(env, ours, std::move(gpus));
  tell_of_held(env, found.held_before);
  if (found.others.empty()) return;
  env.tell(fmt::format(
      "it comes back to a GPU that another program uses: process {}; from then on a kernel of it "
      "that takes more than some 4 s, as one does that waits for another rank, is lost with it "
      "when the GPU is to switch (Xid 109): end or suspend the other one first if it has such",
      listed(found.others, ", ")));
}

std::set<GpuUuid> targets_of(std::span<const GpuUse> needed, std::span<const GpuPair> pairs) {
  std::set<GpuUuid> gpus;
  for (const GpuUse& use : needed)
    gpus.insert(target_of(use.gpu, pairs));
  return gpus;
}

}  // namespace stasis
