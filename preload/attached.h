// The agent of a program that it was brought to while that ran (`stasis attach`).
//
// The program has long had the addresses of the driver's entry points, so the hooks are put there:
// the first bytes of each become a jump to the agent's hook, and where those bytes lie now, with a
// jump back behind them, is the driver's function for the agent (abi/attach_state.h). The tool
// writes the jumps while every thread stands still; the agent prepares all and writes none of the
// driver's code. docs/adr/0053-attach.md.
#pragma once

#include "abi/attach_state.h"
#include "eviction.h"

namespace stasis::preload {

attach::AttachState& attach_state();

// For the agent's thread, with the gate closed and all work on the devices done. Nothing is changed
// but the agent's tables: contexts, peers, and what memory there is and may be taken.
Outcome look_for_memory();
// Exchanges what may be taken, a block after the other, and begins to serve memory. The program's
// threads stand still meanwhile, unless the tool has died. Of a block that could not be had, the
// driver has it at its address as before.
Outcome adopt_memory();

// The driver is the simulated one.
bool is_simulated();
// Memory is adopted, and no more is asked of graphs.
void watch_contexts_alone();

// In bytes of device memory, what is meant to be the least that is worth it, and the unit of the
// driver's own areas, in which blocks lie beside each other (580.159.04).
inline constexpr std::size_t kLeastAdopted = std::size_t{2} << 20;
inline constexpr std::size_t kDriverArea = std::size_t{32} << 20;

}  // namespace stasis::preload
