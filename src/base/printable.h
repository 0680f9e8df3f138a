// Untrusted text, made fit to be shown: what a process calls itself, what an image says.
//
// Functions only; any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace stasis {

// `text` without what a terminal could obey: control characters, in UTF-8 too (U+009B begins a
// command like ESC [), what turns the direction of text, and what is no UTF-8: each becomes '?'.
// Line ends stay only with `keep_lines`.
std::string printable(std::string_view text, bool keep_lines = false);

// The same, at most `most` characters (one at least), the last of them "…" if any are left out.
std::string shortened(std::string_view text, std::size_t most);

}  // namespace stasis
