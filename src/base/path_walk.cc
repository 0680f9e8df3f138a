#include "base/path_walk.h"

#include <algorithm>
#include <cstddef>

namespace stasis {

void push_names(std::string_view path, std::vector<std::string>& rest) {
  std::vector<std::string> names;
  while (!path.empty()) {
    const std::size_t end = std::min(path.find('/'), path.size());
    names.emplace_back(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  rest.insert(rest.end(), names.rbegin(), names.rend());
}

}  // namespace stasis
