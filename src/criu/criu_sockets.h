// The addresses and ports to which CRIU will bind sockets of an image.
//
// Reads CRIU's files.img, which is untrusted: bounded, and wrong input only leaves sockets out.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/fd.h"
#include "proc/bound_socket.h"

namespace stasis {

// Of TCP without connections, which are bound past other sockets; and of UDP. Each once.
std::vector<proc::BoundSocket> bound_sockets(const UniqueFd& criu_dir);

// What no process of the image has open, and CRIU 4.2.1 does not restore so: it is under way in a
// unix socket (SCM_RIGHTS). "socket 123": CRIU leaves a connection in repair mode, and fails to
// restore a unix socket; a timerfd, a watch by inotify or fanotify, memory open by O_PATH. Empty:
// there is none. `unix_sockets_too`: CRIU was not told to leave out sockets that lead out of the
// tree, which have an entry as well.
std::string descriptor_under_way(const UniqueFd& criu_dir, bool unix_sockets_too);

// How many bytes not yet read the image has of each unix socket, by the socket's inode number.
// Empty if that cannot be read.
std::map<std::uint64_t, std::uint64_t> saved_in_unix_sockets(const UniqueFd& criu_dir);

}  // namespace stasis
