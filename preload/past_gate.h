// Libraries whose calls of the driver do not come to the agent: those that the program has opened
// with RTLD_DEEPBIND look for a function among their own dependencies first, and so find the C
// library's dlsym, or the driver, and not what stands in for it.
#pragma once

namespace stasis::preload {

// The name of a library that is loaded so and may call the driver; null if there is none. Takes the
// loader's lock, so not while the gate is closed. Thread-safe.
const char* library_past_gate();

// Changes with every library that the program asks for so.
const void* last_deep_load();

}  // namespace stasis::preload
