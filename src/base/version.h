// The version of this library and of its tools.
#pragma once

namespace stasis {

inline constexpr const char* kVersion = "0.2.0";

}  // namespace stasis
