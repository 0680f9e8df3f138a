// Whether the agent keeps out of this process altogether.
#pragma once

namespace stasis::preload {

// With STASIS_AGENT=off; in our own tools; under a debugger, profiler or checker of CUDA programs,
// which stand where the agent would, and where the agent says so on standard error.
bool steps_aside();

}  // namespace stasis::preload
