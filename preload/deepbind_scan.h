// Libraries whose calls of the driver do not come to the agent: those that the program has opened
// with RTLD_DEEPBIND look for a function among their own dependencies first, and so find the C
// library's dlsym, or the driver, and not what stands in for it.
#pragma once

#include <cstdint>
#include <string>

namespace stasis::preload {

// The name of a library that is loaded so and may call the driver; empty if there is none. Takes
// the loader's lock, so not while the gate is closed. Thread-safe.
std::string library_deep_bound();

// How many times the program has asked for one so. Not while the gate is closed: a caller would
// wait.
std::uint64_t deep_loads();

// Around a fork, so that the child does not find the loader's lock taken by library_deep_bound().
void lock_looking_for_fork();
void unlock_looking_after_fork();

}  // namespace stasis::preload
