#include "group/group_links.h"

#include <algorithm>

namespace stasis {
namespace {

// "OWN OTHER REST" as the other end has it.
std::string reversed(const std::string& link) {
  const std::size_t first = link.find(' ');
  if (first == std::string::npos) return {};
  const std::size_t second = std::min(link.find(' ', first + 1), link.size());
  return link.substr(first + 1, second - first - 1) + " " + link.substr(0, first) +
         link.substr(second);
}

}  // namespace

std::optional<UnmatchedLink> find_unmatched_link(const std::map<std::string, GroupLinks>& parts) {
  std::map<std::string, std::string> ends;  // a part's, by the text that its other end has
  for (const auto& [name, links] : parts)
    for (const auto* list : {&links.established, &links.closing})
      for (const std::string& link : *list)
        ends.emplace(reversed(link), name);
  for (const auto& [name, links] : parts) {
    if (links.may_lead_out) continue;
    for (const std::string& link : links.established) {
      const auto end = ends.find(link);
      if (end == ends.end() || end->second == name) return UnmatchedLink{name, link};
    }
  }
  return std::nullopt;
}

}  // namespace stasis
