// The TCP ports, and the addresses, that a job needs back.
//
// Private to src/operations. Functions only; any thread.
#pragma once

#include "operations/operations.h"

namespace stasis {

// The addresses that sockets of the image are bound to are on this machine, as far as the image
// says, or those that are to be in their place; those of TCP connections too, unless these are to
// be closed. kCriuFailed, naming them, as CRIU's own failure would be.
Result<void> check_addresses(const Manifest& manifest, bool tcp_close,
                             const std::vector<AddressPair>& mapped = {});

// A connection that was closed holds its port for a minute more, so a job that is restored soon
// after its dump could not listen where it did. Ends such connections on the image's ports, or
// waits until they have passed, for a minute. kInterrupted.
Result<void> wait_for_ports(const Environment& env, const Manifest& manifest);

}  // namespace stasis
