// Other addresses for the sockets of an image: those of the machine on which it was made may not be
// there any more, as a pod that comes back elsewhere has another one.
//
// Reads CRIU's files.img, which is untrusted, and leaves it as it is.
#pragma once

#include <netinet/in.h>

#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis {

// One address, and what is to be in its place; both of IPv4, or both of IPv6.
struct AddressPair {
  std::string from;  // as people and manifests write them
  std::string to;
  in6_addr from_bytes{};  // IPv4: ::ffff:a.b.c.d
  in6_addr to_bytes{};
};

// "OLD=NEW". kUsage, also if NEW is no address that one machine can have.
Result<AddressPair> parse_address_pair(const std::string& text);
// The same text if no pair has it.
std::string mapped_address(const std::string& address, const std::vector<AddressPair>& pairs);

// A files.img in which the sockets of IPv4 and IPv6 have the other addresses, at either end. kUsage
// if no socket has an address that is to be another one, if one is named twice, or if two sockets
// would come to have the same address and port; kImageCorrupt.
Result<std::string> files_with_addresses(const std::string& image,
                                         const std::vector<AddressPair>& pairs);

// The image as criu is to see it: a folder in `work_dir`, which is empty until then, of links to
// the files of `criu_dir` through this process's descriptor of that, but for files.img. Errors as
// above; kNotSupported for an image with a mount namespace of its own, in which the links would
// lead elsewhere; kIo.
Result<UniqueFd> map_addresses(const UniqueFd& criu_dir, const UniqueFd& work_dir,
                               const std::vector<AddressPair>& pairs);

}  // namespace stasis
