// The name of this machine.
#pragma once

#include <string>

namespace stasis {

// As gethostname(2) gives it, cut at 255 characters; empty if it gives none.
std::string host_name();

}  // namespace stasis
