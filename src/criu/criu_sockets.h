// The addresses and ports to which CRIU will bind sockets of an image.
//
// Reads CRIU's files.img, which is untrusted: bounded, and wrong input only leaves sockets out.
#pragma once

#include <cstdint>
#include <vector>

#include "base/fd.h"
#include "proc/bound_socket.h"

namespace stasis {

// Of TCP without connections, which are bound past other sockets; and of UDP. Each once.
std::vector<proc::BoundSocket> bound_sockets(const UniqueFd& criu_dir);

// The number in the kernel of a socket that no process of the image has open: it is under way in
// a unix socket (SCM_RIGHTS). CRIU 4.2.1 leaves a connection in repair mode there, and does not
// restore a unix socket. 0: there is none. `unix_sockets_too`: CRIU was not told to leave out
// sockets that lead out of the tree, which have an entry as well.
std::uint64_t socket_under_way(const UniqueFd& criu_dir, bool unix_sockets_too);

}  // namespace stasis
