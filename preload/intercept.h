// How the program's calls of the driver come to the agent: by the names that this library exports
// (programs linked with libcuda), through dlsym, and through cuGetProcAddress. What the agent does
// with a call is in hooks.h and gate.h; nothing there knows how the call came.
#pragma once

#include "driver_calls.h"
#include "hooks.h"

namespace stasis::preload {

// The driver's own functions, past the agent. Null where this driver lacks one, and all of them
// where there is no driver.
struct DriverCalls {
#define STASIS_MEMBER(name) fn::name* name = nullptr;
  STASIS_AGENT_NEEDS(STASIS_MEMBER)
  STASIS_OWN_CALLS(STASIS_MEMBER)
#undef STASIS_MEMBER
};
const DriverCalls& driver();

// The C library's dlsym, past ours. By the version of the x86-64 baseline, which 2.34 and newer
// have for the same function beside their own: the error of a name that is not there would take
// memory, and a program whose malloc comes here for the one behind it would go round in a circle.
using Dlsym = void*(void*, const char*);
Dlsym* real_dlsym();

// What the program calls instead of `real`, any function of the driver's: `real` itself if the
// agent does not hook it.
void* in_place_of(void* real);

}  // namespace stasis::preload
