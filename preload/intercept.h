// How the program's calls of the driver come to the agent: by the names that this library exports
// (programs linked with libcuda), through dlsym, and through cuGetProcAddress. What the agent does
// with a call is in hooks.h and gate.h; nothing there knows how the call came.
#pragma once

#include <span>

#include "driver_calls.h"
#include "hooks.h"

namespace stasis::preload {

// The driver's own functions, past the agent. Null where this driver lacks one, and all of them
// where there is no driver.
struct DriverCalls {
#define STASIS_MEMBER(name) fn::name* name = nullptr;
  STASIS_AGENT_NEEDS(STASIS_MEMBER)
  STASIS_HOOKED_CALLS(STASIS_MEMBER)
#undef STASIS_MEMBER
};
const DriverCalls& driver();

// The C library's dlsym, past ours. By the version of the x86-64 baseline, which 2.34 and newer
// have for the same function beside their own: the error of a name that is not there would take
// memory, and a program whose malloc comes here for the one behind it would go round in a circle.
using Dlsym = void*(void*, const char*);
Dlsym* real_dlsym();

// For an agent that was brought to a program that runs (attached.h): the calls of the list, and
// that the driver of `library` is meant; `real_of` gives what to call for one of its functions,
// past the hook that will be there. Before any hook is.
struct HookRow {
  const char* name;
  void* hook;
};
std::span<const HookRow> hook_rows();
void know_driver_behind_hooks(void* library, void* (*real_of)(void* entry));
// From now on these are told of calls that do work, and of those that make, change or launch CUDA
// graphs, before the driver is; null: of none.
struct CallWatch {
  void (*work)();
  void (*graph)();
};
void watch_calls(const CallWatch* watch);
// As a call of graphs does.
void tell_watch_of_graph();

// What the program calls instead of `real`, any function of the driver's: `real` itself if the
// agent does not hook it.
void* in_place_of(void* real);

}  // namespace stasis::preload
