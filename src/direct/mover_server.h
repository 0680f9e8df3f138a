// The process that MoverProcess forks: a Mover, and the other end of the protocol.
#pragma once

#include <string>

#include "base/channel.h"

namespace stasis::direct {

// Until the owner closes its end, or is gone. Does not return. Closes its contexts before the
// process ends, which is not for tidiness: where a context is left to the kernel, or is made, while
// a kernel runs that belongs to a program which the driver has restored before, the GPU cannot
// switch away from that kernel, and after some 4 s the program is lost (Xid 109, CTX SWITCH
// TIMEOUT; H100, driver 580.159.04, docs/results/2026-11-23-restored-kernels.md).
inline constexpr const char* kMoverName = "stasis-mover";  // for `ps`
// `cache`: the directory in which the driver keeps what it compiles for us; empty: it keeps
// nothing.
[[noreturn]] void serve_mover(const Channel& owner, const std::string& cache);

}  // namespace stasis::direct
