// How far a long step has come, told to whoever shows it to a person.
//
// The library calls update() only on the thread that called into the library, at most some ten
// times a second and once at the end of a phase. The callee must not block for long.
#pragma once

#include <cstdint>
#include <string_view>

namespace stasis {

struct Progress {
  virtual ~Progress() = default;
  // `phase` is a short noun ("checksums", "verify"); `done` and `total` are bytes.
  virtual void update(std::string_view phase, std::uint64_t done, std::uint64_t total) = 0;
};

// For callers that have nobody to tell.
struct NoProgress final : Progress {
  void update(std::string_view, std::uint64_t, std::uint64_t) override {}
};

}  // namespace stasis
