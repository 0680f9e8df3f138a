// Lists for people: a tree can have hundreds of processes that are all in the same way.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace stasis {

inline constexpr std::size_t kShownOfList = 5;

// The first `most` of them: "a; b; and 3 more".
std::string listed(std::span<const std::string> items, std::string_view between = "; ",
                   std::size_t most = kShownOfList);

}  // namespace stasis
