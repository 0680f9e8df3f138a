#include "base/printable.h"

#include <algorithm>

namespace stasis {
namespace {

// The length of the UTF-8 character that `text` begins with, 0 if it begins with none.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (length == 0 || first > 0xf4 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
  }
  return length;
}

// U+200E, U+200F, U+202A to U+202E and U+2066 to U+2069 change the direction of what follows.
bool turns_text(std::string_view character) {
  return character == "\xe2\x80\x8e" || character == "\xe2\x80\x8f" ||
         (character >= "\xe2\x80\xaa" && character <= "\xe2\x80\xae") ||
         (character >= "\xe2\x81\xa6" && character <= "\xe2\x81\xa9");
}

}  // namespace

std::string printable(std::string_view text, bool keep_lines) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto first = static_cast<unsigned char>(text.front());
    const bool c1 = length == 2 && first == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
    const bool turns = length == 3 && turns_text(text.substr(0, 3));
    const bool line_end = first == '\n' && keep_lines;
    if (length == 0 || c1 || turns || ((first < 0x20 || first == 0x7f) && !line_end)) {
      out += '?';
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

std::string shortened(std::string_view text, std::size_t most) {
  std::string out = printable(text.substr(0, 4 * (most + 1)));
  std::size_t characters = 0;
  for (std::size_t at = 0; at < out.size(); ++at) {
    if ((static_cast<unsigned char>(out[at]) & 0xc0U) == 0x80 || ++characters < most) continue;
    // The last that has room; the mark of what is missing takes its place, if anything is.
    const std::size_t end = at + utf8_length(std::string_view(out).substr(at));
    if (end == out.size() && text.size() <= 4 * (most + 1)) return out;
    return out.substr(0, at) + "…";
  }
  return out;
}

}  // namespace stasis
