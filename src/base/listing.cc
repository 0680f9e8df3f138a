#include "base/listing.h"

#include <algorithm>

#include <fmt/format.h>

namespace stasis {

std::string listed(std::span<const std::string> items, std::string_view between, std::size_t most) {
  const auto shown = items.first(std::min(items.size(), most));
  std::string out = fmt::format("{}", fmt::join(shown, between));
  if (items.size() > most) {
    // "a; and 3 more", but "a, b and 3 more".
    out += fmt::format("{}and {} more", between == ", " ? std::string_view(" ") : between,
                       items.size() - most);
  }
  return out;
}

}  // namespace stasis
