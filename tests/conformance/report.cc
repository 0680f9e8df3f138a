#include "report.h"

#include <sstream>

namespace stasis::conformance {

std::string Report::line() const {
  std::ostringstream out;
  out << "{\"case\":\"" << name_ << '"';
  if (!skipped_.empty()) {
    out << ",\"skipped\":\"" << skipped_ << '"';
  } else {
    for (const auto& [key, value] : values_)
      out << ",\"" << key << "\":" << value;
  }
  out << '}';
  return out.str();
}

namespace {

// A flat object of strings, numbers and booleans, as line() writes it; no escapes occur in it.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool string(std::string& out) {
    if (!take('"')) return false;
    const auto end = text_.find('"', at_);
    if (end == text_.npos) return false;
    out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return true;
  }
  bool value(std::string& out) {
    if (at_ < text_.size() && text_[at_] == '"') return string(out);
    const auto end = text_.find_first_of(",}", at_);
    if (end == text_.npos) return false;
    out = text_.substr(at_, end - at_);
    at_ = end;
    return !out.empty();
  }

 private:
  const std::string& text_;
  std::size_t at_ = 0;
};

}  // namespace

bool parse_line(const std::string& text, Line& out) {
  out = Line{};
  Reader reader(text);
  if (!reader.take('{')) return false;
  do {
    std::string key;
    std::string value;
    if (!reader.string(key) || !reader.take(':') || !reader.value(value)) return false;
    if (key == "case")
      out.name = value;
    else if (key == "skipped")
      out.skipped = value;
    else
      out.values[key] = value;
  } while (reader.take(','));
  return reader.take('}') && !out.name.empty();
}

}  // namespace stasis::conformance
