// Whose memory a pages file of CRIU's images holds.
// Reads the heads of pagemap files, which are untrusted: bounded, and wrong input only leaves
// entries out.
#pragma once

#include <map>
#include <string>

#include "base/fd.h"
#include "image/manifest.h"

namespace stasis {

// "pages-1.img" -> the process of the manifest whose private memory it holds, or 0 for memory that
// processes share.
std::map<std::string, Pid> pages_owners(const UniqueFd& criu_dir, const Manifest& manifest);

}  // namespace stasis
