// The ports, and the addresses, that a job needs back.
//
// Private to src/operations. Functions only; any thread.
#pragma once

#include "image/image_reader.h"
#include "operations/operations.h"

namespace stasis {

// The addresses that sockets of the image are bound to are on this machine, as far as the image
// says, or those that are to be in their place; those of TCP connections too, unless these are to
// be closed. kCriuFailed, naming them, as CRIU's own failure would be.
Result<void> check_addresses(const Manifest& manifest, bool tcp_close,
                             const std::vector<AddressPair>& mapped = {});

// A connection that was closed holds its port for a minute more, so a job that is restored soon
// after its dump could not listen where it did. Ends such connections at the image's addresses and
// ports, or waits until they have passed, for a minute. Nothing where the image has a network of
// its own. kInterrupted.
Result<void> wait_for_ports(const Environment& env, const ImageReader& image,
                            const std::vector<AddressPair>& mapped);
// No other program's socket is in the way of one of the image's, of TCP or UDP; what
// wait_for_ports() waits for is not. kBusy, naming the address and the port.
Result<void> check_ports(const ImageReader& image, const std::vector<AddressPair>& mapped = {});

}  // namespace stasis
