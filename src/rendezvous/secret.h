// What the parts of a group share, and no other has.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "base/result.h"

namespace stasis::rendezvous {

inline constexpr std::size_t kLeastSecret = 16;
inline constexpr std::size_t kMostSecret = 4096;

// Moves, and is wiped from memory.
class GroupKey {
 public:
  // kUsage for less than kLeastSecret bytes; kInternal if the library does not start.
  static Result<GroupKey> from_secret(std::string_view secret);
  // The content of a file: regular, of the caller or root, closed to all others, not reached by a
  // link as its last name. kNotPermitted, kNotSupported, kUsage, kIo.
  static Result<GroupKey> from_file(const std::string& path);
  GroupKey(GroupKey&& other) noexcept;
  GroupKey& operator=(GroupKey&&) = delete;
  GroupKey(const GroupKey&) = delete;
  GroupKey& operator=(const GroupKey&) = delete;
  ~GroupKey();

  const std::array<unsigned char, 32>& bytes() const { return bytes_; }

 private:
  GroupKey() = default;
  std::array<unsigned char, 32> bytes_{};
};

}  // namespace stasis::rendezvous
