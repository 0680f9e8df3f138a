// The agent's own answers to the calls of STASIS_HOOKED_CALLS (calls.h).
#pragma once

#include "calls.h"
#include "driver_calls.h"

namespace stasis::preload::hooks {

#define STASIS_DECLARE(name) fn::name name;
STASIS_HOOKED_CALLS(STASIS_DECLARE)
#undef STASIS_DECLARE

}  // namespace stasis::preload::hooks
