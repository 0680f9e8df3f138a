// "Did you mean": the word that was probably meant.
//
// Functions only; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace stasis {

// The one of `candidates` that alone begins with `word`; else the one that differs least from it,
// by at most a third of its letters, at least one; empty if none does. Dashes in front do not
// count, nor does what is known with something put before it ("no-..."), which means the opposite.
// Two letters that have changed places count as one difference.
std::string closest(std::string_view word, std::span<const std::string> candidates);

// What a message ends with that knows what was meant: "; did you mean 'dump'?". Empty for nothing.
std::string did_you_mean(const std::string& meant);

}  // namespace stasis
