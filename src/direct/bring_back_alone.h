// For tools that unlock one process and have no mover: NVIDIA's utility as we stand in for it, and
// the calls of C for a process alone.
#pragma once

#include "base/interrupt.h"
#include "base/result.h"
#include "checkpoint/process.h"
#include "direct/agent_client.h"

namespace stasis {

// If the process's memory is away by the direct path, its agent brings it back, managed memory too.
// Nothing to do where there is no agent, or another tool is its peer. `interrupt`, if any, is
// heeded at the second request. The driver must not hold the process. The errors of
// AgentClient::bring_back(); memory of other processes only `stasis recover` brings back.
Result<void> bring_back_alone(const Process& process,
                              const direct::AgentClient::GpuMemory& of_all_gpus,
                              const Interrupt* interrupt);

}  // namespace stasis
