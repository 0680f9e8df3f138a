// The process that MoverProcess forks: a Mover, and the other end of the protocol.
#pragma once

#include "base/channel.h"

namespace stasis::direct {

// Until the owner closes its end. Does not return: closing contexts and unpinning memory takes 0.1
// s and more, and the kernel does it as well.
inline constexpr const char* kMoverName = "stasis-mover";  // for `ps`
[[noreturn]] void serve_mover(const Channel& owner);

}  // namespace stasis::direct
