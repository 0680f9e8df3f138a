#include "criu/criu_external.h"

#include <algorithm>
#include <string_view>

namespace stasis {
namespace {

constexpr std::string_view kMount = "mnt[";

// "mnt[/path]:key" -> "mnt[key]:/path". "mnt[]" and "mnt[]:flags" are about mounts that CRIU finds
// by itself, and read the same on both sides.
std::string reversed(const std::string& text) {
  const std::size_t close = text.find("]:");
  if (!text.starts_with(kMount) || close == std::string::npos || close == kMount.size()) {
    return text;
  }
  const std::string path = text.substr(kMount.size(), close - kMount.size());
  const std::string key = text.substr(close + 2);
  if (key.empty()) return text;
  return std::string(kMount).append(key).append("]:").append(path);
}

// What the words are about: "mnt[key]" of "mnt[key]:/path".
std::string_view subject(std::string_view text) { return text.substr(0, text.find("]:")); }

}  // namespace

std::vector<std::string> externals_for_restore(const std::vector<std::string>& dumped,
                                               const std::vector<std::string>& given) {
  std::vector<std::string> all;
  for (const std::string& text : dumped) {
    std::string here = reversed(text);
    const bool replaced = std::any_of(given.begin(), given.end(), [&](const std::string& other) {
      return subject(other) == subject(here);
    });
    if (!replaced) all.push_back(std::move(here));
  }
  all.insert(all.end(), given.begin(), given.end());
  return all;
}

}  // namespace stasis
