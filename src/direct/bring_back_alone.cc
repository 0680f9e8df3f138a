#include "direct/bring_back_alone.h"

#include <utility>

#include <fmt/format.h>

#include "direct/stillness.h"

namespace stasis {

using direct::AgentClient;
using direct::AgentCommand;

Result<void> bring_back_alone(const Process& process, const AgentClient::GpuMemory& of_all_gpus,
                              const Interrupt* interrupt) {
  // The agent itself and tools that only probe have its lock for microseconds; any other tool that
  // has it sees to the rest.
  constexpr std::chrono::milliseconds kTimeout{50};
  const Pid pid = process.pid();
  auto agent = AgentClient::find(pid, process.pidfd(), kTimeout);
  if (!agent) {
    if (agent.error().code == ErrorCode::kBusy) return {};
    return fail(std::move(agent.error()));
  }
  if (!*agent || (*agent)->state() != direct::AgentState::kHeld) return {};
  (*agent)->heed(interrupt, AgentClient::Heeds::kSecond);
  auto done = (*agent)->check_size(of_all_gpus);
  if (!done) return done;
  done = (*agent)->bring_back({}, [&](AgentClient& client) -> Result<void> {
    if (client.detached_count() == 0 || client.managed_areas() == 0) return {};
    STASIS_TRY_ASSIGN(const auto thread, process.restore_thread_id());
    Stillness still;
    STASIS_TRY(still.keep(client, {{pid, thread}}));
    client.begin(AgentCommand::kRetake, 0);
    STASIS_TRY(still.finish(client));
    return still.end();
  });
  if (done) return done;
  Error why = std::move(done.error());
  why.remedy +=
      fmt::format("{}`stasis recover {}`", why.remedy.empty() ? "" : "; then ", pid.value);
  return fail(std::move(why));
}

}  // namespace stasis
