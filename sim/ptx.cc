#include "sim/ptx.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace stasis::sim {
namespace {

std::string without_comments(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i, 2) == "//") {
      i = std::min(text.find('\n', i), text.size());
      out += '\n';
    } else if (text.substr(i, 2) == "/*") {
      i = text.find("*/", i);
      if (i == std::string_view::npos) break;
      ++i;
      out += ' ';
    } else {
      out += text[i];
    }
  }
  return out;
}

// Words, and each of ( ) [ ] { } , ; as a token of its own.
class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text) {}
  std::string_view next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])))
      ++at_;
    const auto start = at_;
    if (at_ == text_.size()) return {};
    if (is_mark(text_[at_])) return text_.substr(at_++, 1);
    while (at_ < text_.size() && !is_mark(text_[at_]) &&
           !std::isspace(static_cast<unsigned char>(text_[at_]))) {
      ++at_;
    }
    return text_.substr(start, at_ - start);
  }

 private:
  static bool is_mark(char c) {
    return std::string_view("()[]{},;<>").find(c) != std::string_view::npos;
  }
  std::string_view text_;
  std::size_t at_ = 0;
};

// ".u64" -> 8; 0 if it is no type.
std::size_t type_size(std::string_view word) {
  if (word == ".pred") return 1;
  if (word.size() < 3 || word[0] != '.') return 0;
  static constexpr std::string_view kKinds = "busf";
  if (kKinds.find(word[1]) == std::string_view::npos) return 0;
  unsigned bits = 0;
  auto [end, ec] = std::from_chars(word.data() + 2, word.data() + word.size(), bits);
  if (ec != std::errc{} || end != word.data() + word.size() || bits % 8) return 0;
  return bits / 8;
}

bool parse_count(std::string_view word, std::size_t& out) {
  auto [end, ec] = std::from_chars(word.data(), word.data() + word.size(), out);
  return ec == std::errc{} && end == word.data() + word.size() && out > 0;
}

// One ".param .align 8 .b8 name[16]" up to the "," or ")" that ends it.
bool parse_parameter(Tokens& tokens, PtxKernel& kernel, bool& last) {
  std::size_t alignment = 0;
  std::size_t element = 0;
  std::size_t count = 1;
  for (auto word = tokens.next();; word = tokens.next()) {
    if (word.empty()) return false;
    if (word == "," || word == ")") {
      last = word == ")";
      break;
    }
    if (word == ".align") {
      // After .ptr it describes what is pointed to, and the parameter has its type already.
      std::size_t value = 0;
      if (!parse_count(tokens.next(), value)) return false;
      if (!element) alignment = value;
    } else if (word == "[") {
      std::size_t length = 0;
      if (!parse_count(tokens.next(), length) || tokens.next() != "]") return false;
      count *= length;
    } else if (auto size = type_size(word); size && !element) {
      element = size;
    }
  }
  if (!element) return false;
  alignment = std::max(alignment, element);
  const auto offset = (kernel.argument_bytes + alignment - 1) / alignment * alignment;
  kernel.parameters.push_back({offset, element * count});
  kernel.argument_bytes = offset + element * count;
  return true;
}

// What follows ".global", up to its ";" or the "=" before its content.
bool parse_variable(Tokens& tokens, PtxModule& out) {
  PtxVariable variable;
  bool is_managed = false;
  std::size_t element = 0;
  for (auto word = tokens.next(); word != ";" && word != "="; word = tokens.next()) {
    if (word.empty()) return false;
    if (word == "[") {
      std::size_t length = 0;
      if (!parse_count(tokens.next(), length) || tokens.next() != "]") return false;
      variable.size *= length;
    } else if (word == ".managed") {
      is_managed = true;
    } else if (const auto size = type_size(word); size && !element) {
      element = variable.size = size;
    } else if (element) {
      variable.name = word;
    }
  }
  if (is_managed && (variable.name.empty() || variable.size == 0)) return false;
  if (is_managed) out.managed.push_back(std::move(variable));
  return true;
}

}  // namespace

bool parse_ptx(std::string_view text, PtxModule& out) {
  out = {};
  const auto clean = without_comments(text);
  if (clean.find(".version") == std::string::npos) return false;
  Tokens tokens(clean);
  for (auto word = tokens.next(); !word.empty(); word = tokens.next()) {
    if (word == ".global" && !parse_variable(tokens, out)) return false;
    if (word != ".entry") continue;
    PtxKernel kernel;
    kernel.name = tokens.next();
    if (kernel.name.empty()) return false;
    auto after = tokens.next();
    if (after == "(") {
      // Empty parentheses are legal; a first ")" is looked for by hand.
      Tokens ahead = tokens;
      bool last = ahead.next() == ")";
      if (last) tokens.next();
      while (!last) {
        if (!parse_parameter(tokens, kernel, last)) return false;
      }
    }
    out.kernels.push_back(std::move(kernel));
  }
  return true;
}

}  // namespace stasis::sim
