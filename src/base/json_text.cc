#include "base/json_text.h"

#include <set>
#include <vector>

#include <fmt/format.h>

namespace stasis {
namespace {

using Json = nlohmann::json;

// A pass of its own: nlohmann's parser with a callback looks at all earlier siblings after each
// object.
class Watch final : public nlohmann::json_sax<Json> {
 public:
  explicit Watch(const JsonLimits& limits) : limits_(limits) {}

  const std::string& problem() const { return problem_; }

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return value() && begin(); }
  bool end_object() override { return end(); }
  bool start_array(std::size_t) override { return value() && begin(); }
  bool end_array() override { return end(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) return stop("a field stands twice");
    return value();
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  bool stop(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool begin() {
    keys_.emplace_back();
    return keys_.size() <= limits_.depth || stop("it is nested too deeply");
  }
  bool end() {
    keys_.pop_back();
    return true;
  }
  bool value() {
    return ++values_ <= limits_.values ||
           stop(fmt::format("it has more than {} values", limits_.values));
  }

  const JsonLimits& limits_;
  std::string problem_;
  std::vector<std::set<std::string>> keys_;
  std::size_t values_ = 0;
};

}  // namespace

std::string json_problem(std::string_view text, const JsonLimits& limits) {
  Watch watch(limits);
  const bool whole = Json::sax_parse(text.begin(), text.end(), &watch);
  if (!watch.problem().empty()) return watch.problem();
  return whole ? std::string() : "it is no JSON";
}

Json parse_json(std::string_view text, const JsonLimits& limits) {
  if (!json_problem(text, limits).empty()) return Json(Json::value_t::discarded);
  return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

}  // namespace stasis
