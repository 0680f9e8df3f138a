// The addresses and ports to which CRIU will bind sockets of an image.
//
// Reads CRIU's files.img, which is untrusted: bounded, and wrong input only leaves sockets out.
#pragma once

#include <vector>

#include "base/fd.h"
#include "proc/bound_socket.h"

namespace stasis {

// Of TCP without connections, which are bound past other sockets; and of UDP. Each once.
std::vector<proc::BoundSocket> bound_sockets(const UniqueFd& criu_dir);

}  // namespace stasis
