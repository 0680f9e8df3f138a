// Result<T>: a value or an Error. Functions that can fail return one; none throws.
#pragma once

#include <utility>

#include <tl/expected.hpp>

#include "base/error.h"

namespace stasis {

template <class T>
using Result = tl::expected<T, Error>;

// The failure side of a Result, from its parts.
inline tl::unexpected<Error> fail(ErrorCode code, std::string message, std::string remedy = {}) {
  return tl::unexpected<Error>(
      Error{code, std::move(message), std::move(remedy), std::nullopt, {}});
}

inline tl::unexpected<Error> fail(Error error) { return tl::unexpected<Error>(std::move(error)); }

}  // namespace stasis
