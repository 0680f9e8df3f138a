// Where the agent's library is.
#pragma once

#include <string>

#include "base/result.h"

namespace stasis::cli {

// Beside this program, as the build and the packages lay it out: bin/stasis, lib/stasis/; or as
// STASIS_PRELOAD says. kIo if it is not there.
Result<std::string> find_agent_library();

}  // namespace stasis::cli
