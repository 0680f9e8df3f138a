// The mappings of this process, as the kernel lists them.
#pragma once

#include <cstdint>
#include <functional>

namespace stasis::preload {

struct OwnMapping {
  std::uintptr_t start = 0;
  std::uintptr_t end = 0;
  char rights[5] = "";  // "r-xp"
  std::uint64_t inode = 0;
};

// In the order of their addresses. False if they cannot be read.
bool for_each_own_mapping(const std::function<void(const OwnMapping&)>& visit);

}  // namespace stasis::preload
