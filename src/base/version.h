// The version of this library and of its tools.
#pragma once

namespace stasis {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace stasis
