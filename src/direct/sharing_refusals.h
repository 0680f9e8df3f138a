// The words of what is refused of memory that processes share. Private to src/direct.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "base/result.h"
#include "direct/sharing.h"

namespace stasis {

// What the process has imported and none of these can lend, or inherits.
struct Orphans {
  std::size_t count = 0;
  std::uint64_t bytes = 0;
  std::set<std::uint64_t> services;              // by which their owners are known
  std::size_t foreign = 0;                       // of these, those whose owner no agent knows
  const ProcessShares* of_other_user = nullptr;  // an owner that lends it to its own user alone
};

// "1 piece (2 MiB)".
std::string pieces(std::size_t count, std::uint64_t bytes);

// kNotSupported, each; an import that could not be had again. `what` and `remedy` as in Obstacle.
Result<void> refuse_import(Pid pid, std::string what, std::string remedy);
Result<void> refuse_foreign(Pid pid, const Orphans& orphans);
// The agent takes over what an owner that ends leaves behind, by the connection that it has to it.
Result<void> refuse_lost_owner(Pid pid, const Orphans& orphans);
Result<void> refuse_of_other_user(const ProcessShares& importer, const ProcessShares& owner);

}  // namespace stasis
