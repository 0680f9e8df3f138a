// What those need who go the way of a path by themselves, name by name, to judge each link.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace stasis {

// As many as the kernel follows in one path (MAXSYMLINKS of linux/namei.h).
inline constexpr int kMostLinks = 40;

// Puts the names of `path` at the end of `rest`, the first one last, so that it comes next; an
// empty one where two slashes meet.
void push_names(std::string_view path, std::vector<std::string>& rest);

}  // namespace stasis
