// How many more files a process may open.
//
// Reads /proc only; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/ids.h"

namespace stasis::proc {

struct DescriptorLimit {
  std::uint64_t limit = 0;  // the soft one of RLIMIT_NOFILE: numbers below it may be given out
  std::uint64_t spare = 0;  // of those, the ones that are free
};

// Nothing for a process that is gone, has no limit, or may not be looked at. `proc` is "/proc" but
// in tests.
std::optional<DescriptorLimit> descriptor_limit(Pid pid, const std::string& proc = "/proc");

}  // namespace stasis::proc
