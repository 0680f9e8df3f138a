// Whether the agent keeps out of this process altogether.
#pragma once

#include "abi/activation.h"

namespace stasis::preload {

// With STASIS_AGENT=off; in our own tools; under a debugger, profiler or checker of CUDA programs,
// which stand where the agent would, and where the agent says so on standard error.
bool is_inactive();

// The same, of one that may not serve yet. Decided at the first call.
direct::Activation activation();
inline bool must_be_inactive() { return activation() != direct::Activation::kWorks; }

// Brought to a program that ran already (attached.h): says nothing, and serves no memory before all
// that came past its hooks is over. Set once, before any hook is there.
void set_attached();
bool is_attached();
// The driver's pools have what the program has allocated from them before, and stay with it.
inline bool serves_pools() { return !is_inactive() && !is_attached(); }
// From here on it serves memory, with the gate closed.
void begin_to_serve();

}  // namespace stasis::preload
