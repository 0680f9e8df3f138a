// The TCP connections between the parts of a group, as each part names its own. Private to
// src/group. Touches nothing; thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "group/group_part.h"

namespace stasis {

struct UnmatchedLink {
  std::string part;
  std::string link;
};

// A connection of a part, by its name, that is no other part's, from its other end; nothing if all
// are, or may lead out.
std::optional<UnmatchedLink> find_unmatched_link(const std::map<std::string, GroupLinks>& parts);

}  // namespace stasis
