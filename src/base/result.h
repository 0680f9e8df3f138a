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
  return tl::unexpected<Error>(Error{code, std::move(message), std::move(remedy)});
}

inline tl::unexpected<Error> fail(Error error) { return tl::unexpected<Error>(std::move(error)); }

}  // namespace stasis

// Returns from the calling function with the error of a Result, if it is one.
//   STASIS_TRY(write_all(fd, text));
#define STASIS_TRY(...) STASIS_TRY_AS_(STASIS_JOINED_(stasis_tried_, __COUNTER__), __VA_ARGS__)
// The same, and otherwise declares what has the value.
//   STASIS_TRY_ASSIGN(const auto text, read_file(path));
#define STASIS_TRY_ASSIGN(declaration, ...) \
  STASIS_TRY_ASSIGN_AS_(STASIS_JOINED_(stasis_tried_, __COUNTER__), declaration, __VA_ARGS__)

#define STASIS_JOINED_(a, b) STASIS_JOINED_AS_(a, b)
#define STASIS_JOINED_AS_(a, b) a##b
#define STASIS_TRY_AS_(tried, ...)                                                           \
  do {                                                                                       \
    if (auto tried = (__VA_ARGS__); !tried) return ::stasis::fail(std::move(tried.error())); \
  } while (false)
#define STASIS_TRY_ASSIGN_AS_(tried, declaration, ...)         \
  auto tried = (__VA_ARGS__);                                  \
  if (!tried) return ::stasis::fail(std::move(tried.error())); \
  declaration = std::move(*tried)
