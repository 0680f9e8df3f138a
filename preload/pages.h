// The sizes of the kernel's pages.
#pragma once

#include <cstddef>

namespace stasis::preload {

inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace stasis::preload
