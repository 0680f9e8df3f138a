// "Did you mean": the word that was probably meant.
//
// Functions only; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace stasis::cli {

// The one of `candidates` that differs least from `word`, by at most a third of its letters, at
// least one; empty if none does. Two letters that have changed places count as one difference.
std::string closest(std::string_view word, std::span<const std::string> candidates);

}  // namespace stasis::cli
