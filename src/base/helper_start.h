// What a helper of ours does first, which outlives its owner for a moment and must not disturb that
// one or hold anything of it.
#pragma once

#include <span>

namespace stasis {

// Signals of a terminal, or of a service that is stopped, are for the owner, which rolls back and
// needs the helper for that. Those of faults and SIGCHLD keep their default; none is blocked.
void ignore_signals();

// Closes all descriptors but `kept`, and the standard ones become /dev/null: a lock of a journal,
// or the pipe that another program reads our output from, must not stay open.
void close_all_but(std::span<const int> kept);

}  // namespace stasis
