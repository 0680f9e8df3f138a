// Managed memory (cuMemAllocManaged). The driver refuses to checkpoint a process that has any, and
// from then on refuses it for ever (580.159.04); freed before the driver is asked, and allocated
// again afterwards at the same addresses, it survives. docs/adr/0048-managed-memory.md.
//
// The driver takes managed memory from areas of whole 32 MiB, which memory of less than that
// shares. Only an area has an address that can be chosen, by steering the driver's mmap(). So the
// agent asks the driver for whole areas, and each piece of the program's lies alone in its own; it
// costs addresses, as pages only come when they are touched.
//
// For the agent's thread, with the gate closed and the program's threads kept still, as those reach
// managed memory without a call, unless they say otherwise.
#pragma once

#include <atomic>
#include <cstdint>

#include "abi/agent_protocol.h"
#include "copiers.h"
#include "eviction.h"

namespace stasis::preload {

using direct::kManagedArea;

// Areas of memory that save_managed() can give up, and the same written where the tools read it, in
// the order in which they change, and whether there are any. At any time.
std::uint32_t managed_areas();
void write_managed_areas(std::uint32_t& areas, std::atomic<bool>& any);
// Pieces that are away. At any time.
std::uint32_t managed_away();

// Frees all of it. Its content is then at its addresses as memory of the process's own, so that a
// thread of the program reads and writes there what it would have; what is all zeros takes no
// memory. `room`: bytes of the host's memory that it may take. On a failure some of it is away.
Outcome save_managed(std::uint64_t room = UINT64_MAX);
// Allocates all that is away at its addresses again, with its content, and what the program has
// said of it.
Outcome retake_managed();

}  // namespace stasis::preload
