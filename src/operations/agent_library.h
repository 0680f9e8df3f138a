// Where the agent's library is.
#pragma once

#include <memory>
#include <string>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// Beside this program or library, as the build and the packages lay it out: bin/stasis,
// lib/stasis/; or as STASIS_PRELOAD says. kIo if it is not there.
Result<std::string> find_agent_library();
// The same, open: for a process that goes where the target is, which may see no such file.
Result<std::shared_ptr<const UniqueFd>> open_agent_library();

}  // namespace stasis
