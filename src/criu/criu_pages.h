// Whose memory a pages file of CRIU's images holds.
//
// Reads the heads of pagemap files, from anybody: bounded, and wrong input only leaves entries out.
#pragma once

#include <map>
#include <string>

#include "image/manifest.h"

namespace stasis {

// "pages-1.img" -> the process whose private memory it holds, for the processes of the manifest.
std::map<std::string, Pid> pages_owners(const std::string& criu_dir, const Manifest& manifest);

}  // namespace stasis
