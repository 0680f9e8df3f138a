#include "direct/driver_room.h"

#include <algorithm>

#include "direct/agent_probe.h"
#include "driver/gpu_plan.h"

namespace stasis::direct {

Result<GpuRoom> find_driver_room(Driver& driver, std::span<const Pid> processes,
                                 std::span<const GpuUse> needed, std::span<const GpuPair> pairs,
                                 const GpuRoom::Wait& wait) {
  const bool away = std::any_of(processes.begin(), processes.end(), [](Pid pid) {
    const auto agent = probe_agent(pid);
    return agent && *agent && is_away((*agent)->state);
  });
  if (away) return GpuRoom::hold(targets_of(needed, pairs), wait);
  return GpuRoom::find(driver, needed, pairs, wait);
}

}  // namespace stasis::direct
