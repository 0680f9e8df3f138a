#include "base/suggest.h"

#include <algorithm>
#include <vector>

namespace stasis {
namespace {

// Optimal string alignment (Damerau-Levenshtein without repeated edits of one place).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> above(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j)
    above[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = a[i - 1] == b[j - 1] ? 0 : 1;
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

std::string_view without_dashes(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  return word;
}

}  // namespace

std::string closest(std::string_view word, std::span<const std::string> candidates) {
  constexpr std::size_t kLongest = 64;  // of a word that the user may have meant
  const std::string_view said = without_dashes(word);
  if (said.empty() || said.size() > kLongest) return {};
  std::size_t least = std::max<std::size_t>(1, said.size() / 3) + 1;
  std::string out;
  std::size_t begin_so = 0;
  std::string begins_so;
  for (const std::string& candidate : candidates) {
    const std::string_view known = without_dashes(candidate);
    if (known.starts_with(said)) {
      ++begin_so;
      begins_so = candidate;
    }
    // "unsuspend", "--no-leave-running": the opposite.
    if (said != known && said.ends_with(known)) continue;
    const std::size_t differs = distance(said, known);
    if (differs >= least) continue;
    least = differs;
    out = candidate;
  }
  return begin_so == 1 ? begins_so : out;
}

std::string did_you_mean(const std::string& meant) {
  return meant.empty() ? std::string() : "; did you mean '" + meant + "'?";
}

}  // namespace stasis
