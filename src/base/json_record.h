// Records that are kept or sent as JSON. Each has one description of its fields, by which it is
// written and read:
//
//   void fields(auto& io, Described<SwapParty> auto& party) {
//     io("name", party.name);
//     io.optional("gpu_map", party.gpu_map);
//   }
//
// There is one in the program for each type, wherever it stands: two would be one to the linker.
// The reader takes what comes from outside: it throws nothing, cuts no number off, and remembers
// the first thing that is wrong. Values; one thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/ids.h"
#include "base/json_text.h"

namespace stasis {

// The record that a description is of, const where it is written.
template <class T, class Record>
concept Described = std::same_as<std::remove_const_t<T>, Record>;

// The largest whole number that every reader of JSON holds exactly.
inline constexpr std::uint64_t kMostExact = (std::uint64_t{1} << 53) - 1;

// What a number may be, also each of a list.
struct Within {
  std::uint64_t least = 0;
  std::uint64_t most = kMostExact;
};
// A number may be negative.
struct Signed {};
// How many items a list may have, or bytes a text.
struct Items {
  std::size_t least = 0;
  std::size_t most = std::numeric_limits<std::size_t>::max();
};

namespace json_record {

template <class T, template <class...> class Template>
inline constexpr bool kIs = false;
template <template <class...> class Template, class... Args>
inline constexpr bool kIs<Template<Args...>, Template> = true;

template <class T>
concept Number = std::same_as<T, Pid> || std::same_as<T, Tid> || std::is_enum_v<T> ||
    kIs<T, std::chrono::duration> ||(std::integral<T> && !std::same_as<T, bool>);

template <class T>
inline constexpr bool kIsFloating = std::floating_point<T>;
template <class Rep, class Period>
inline constexpr bool kIsFloating<std::chrono::duration<Rep, Period>> = std::floating_point<Rep>;

// What a number of this type may be, unless a description says otherwise.
template <class T>
constexpr Within within() {
  if constexpr (std::integral<T>)
    return {0, std::min(kMostExact, std::uint64_t{std::numeric_limits<T>::max()})};
  else if constexpr (kIs<T, std::chrono::duration>)
    return {};
  else
    return {0, std::numeric_limits<int>::max()};
}

template <class Limit>
constexpr Limit limit(Limit usual) {
  return usual;
}
template <class Limit, class First, class... More>
constexpr Limit limit(Limit usual, First first, More... more) {
  if constexpr (std::same_as<Limit, First>)
    return first;
  else
    return limit(usual, more...);
}

template <class T>
bool is_empty(const T& value) {
  if constexpr (kIs<T, std::optional>)
    return !value;
  else if constexpr (requires { value.empty(); })
    return value.empty();
  else
    return value == T();
}

}  // namespace json_record

template <class Json>
class JsonWriter {
 public:
  static constexpr bool kReads = false;
  explicit JsonWriter(Json& object) : object_(object) { object_ = Json::object(); }

  template <class T, class... Limits>
  void operator()(const char* key, const T& value, Limits... limits) {
    object_[key] = json_of(value, limits...);
  }
  // Left out where it is empty, 0 or false.
  template <class T, class... Limits>
  void optional(const char* key, const T& value, Limits... limits) {
    if (!json_record::is_empty(value)) add(key, value, limits...);
  }
  // Left out where it is as usual.
  template <class T, class... Limits>
  void unless(const T& usual, const char* key, const T& value, Limits... limits) {
    if (value != usual) add(key, value, limits...);
  }
  template <class T, class Name, class Known, class... Limits>
  void named(const char* key, const T& value, Name name, Known /*known*/, Limits... /*limits*/) {
    object_[key] = std::invoke(name, value);
  }
  template <class T, class Name, class Known>
  void optional_named(const char* key, const std::optional<T>& value, Name name, Known known) {
    if (value) named(key, *value, name, known);
  }
  void check(bool /*good*/, const char* /*key*/, const char* /*what*/) {}

  template <class T, class... Limits>
  static Json json_of(const T& value, Limits... limits) {
    using namespace json_record;  // NOLINT(google-build-using-namespace)
    Json out;
    if constexpr (kIs<T, std::optional>) {
      out = json_of(*value, limits...);
    } else if constexpr (kIs<T, std::variant>) {
      out["kind"] = value.index();
      out["value"] = std::visit([](const auto& one) { return json_of(one); }, value);
    } else if constexpr (kIs<T, std::vector>) {
      out = Json::array();
      for (const auto& item : value)
        out.push_back(json_of(item));
    } else if constexpr (std::same_as<T, Pid> || std::same_as<T, Tid>) {
      out = value.value;
    } else if constexpr (kIs<T, std::chrono::duration>) {
      out = value.count();
    } else if constexpr (std::is_enum_v<T>) {
      out = static_cast<int>(value);
    } else if constexpr (std::unsigned_integral<T> && !std::same_as<T, bool>) {
      out = std::min<std::uint64_t>(value, std::max(kMostExact, limit(Within(), limits...).most));
    } else if constexpr (requires { Json(value); }) {
      out = value;
    } else {
      JsonWriter writer(out);
      if constexpr (!std::is_empty_v<T>) fields(writer, value);
    }
    return out;
  }

 private:
  // A list or a text that no reader takes is left out.
  template <class T, class... Limits>
  void add(const char* key, const T& value, Limits... limits) {
    if constexpr (requires { value.size(); }) {
      if (value.size() > json_record::limit(Items(), limits...).most) return;
    }
    (*this)(key, value, limits...);
  }

  Json& object_;
};

class JsonReader {
 public:
  using Json = nlohmann::json;
  static constexpr bool kReads = true;

  // What is wrong: "processes[3].pid is missing"; empty as long as nothing is.
  struct Problem {
    std::string what;
    std::size_t most_text = std::numeric_limits<std::size_t>::max();  // bytes of each text
  };
  template <class T>
  static T read(const Json& json, Problem& problem, const char* key = "") {
    T out;
    JsonReader(json, {nullptr, key}, problem).value(json, {nullptr, key}, out);
    return out;
  }

  // What an item of a list is before it is read.
  template <class T>
  static T blank() {
    return T();
  }

  template <class T, class... Limits>
  void operator()(const char* key, T& to, Limits... limits) {
    const auto found = object_.find(key);
    if (found == object_.end())
      complain(key, "is missing");
    else
      value(*found, {&place_, key}, to, limits...);
  }
  template <class T, class... Limits>
  void optional(const char* key, T& to, Limits... limits) {
    if (object_.contains(key)) (*this)(key, to, limits...);
  }
  template <class T, class... Limits>
  void unless(const T& /*usual*/, const char* key, T& to, Limits... limits) {
    optional(key, to, limits...);
  }
  // `known` gives the value of a name, or nothing. The limits are those of the name.
  template <class T, class Name, class Known, class... Limits>
  void named(const char* key, T& to, Name /*name*/, Known known, Limits... limits) {
    std::string text;
    (*this)(key, text, limits...);
    if (auto found = known(text))
      to = *found;
    else
      complain(key, "is no value that is known");
  }
  template <class T, class Name, class Known>
  void optional_named(const char* key, std::optional<T>& to, Name name, Known known) {
    if (object_.contains(key)) named(key, to, name, known);
  }
  void check(bool good, const char* key, const char* what) {
    if (!good) complain(key, what);
  }
  void complain(const char* key, std::string_view what) { complain(Place{&place_, key}, what); }

 private:
  // Put into words only for a complaint: an image may have a million files.
  struct Place {
    const Place* outer = nullptr;
    const char* key = nullptr;  // or an item of a list
    std::size_t index = 0;

    std::string text() const {
      const std::string before = outer != nullptr ? outer->text() : std::string();
      if (key == nullptr) return fmt::format("{}[{}]", before, index);
      return before.empty() ? key : before + "." + key;
    }
  };

  JsonReader(const Json& object, Place place, Problem& problem)
      : object_(object), place_(place), problem_(problem) {}

  void complain(const Place& place, std::string_view what) {
    if (problem_.what.empty()) problem_.what = fmt::format("{} {}", place.text(), what);
  }

  template <class T, class... Limits>
  void value(const Json& json, const Place& place, T& to, Limits... limits) {
    using namespace json_record;  // NOLINT(google-build-using-namespace)
    if constexpr (std::same_as<T, Json>) {
      to = json;
    } else if constexpr (kIs<T, std::optional>) {
      value(json, place, to.emplace(), limits...);
    } else if constexpr (kIs<T, std::variant>) {
      choice(json, place, to, std::make_index_sequence<std::variant_size_v<T>>());
    } else if constexpr (kIs<T, std::vector>) {
      if (!json.is_array()) return complain(place, "is no array");
      if (!has_size(json.size(), place, "items", limit(Items(), limits...))) return;
      for (std::size_t i = 0; i < json.size() && problem_.what.empty(); ++i) {
        auto& item = to.emplace_back(blank<typename T::value_type>());
        if constexpr ((std::same_as<Limits, Within> || ...))
          value(json[i], {&place, nullptr, i}, item, limit(Within(), limits...));
        else
          value(json[i], {&place, nullptr, i}, item);
      }
    } else if constexpr (std::same_as<T, std::string>) {
      const auto* text = json.get_ptr<const std::string*>();
      if (text == nullptr) return complain(place, "is no text");
      Items wanted = limit(Items(), limits...);
      wanted.most = std::min(wanted.most, problem_.most_text);
      if (has_size(text->size(), place, "bytes", wanted)) to = *text;
    } else if constexpr (std::same_as<T, bool>) {
      if (!json.is_boolean()) return complain(place, "is neither true nor false");
      to = json.get<bool>();
    } else if constexpr (kIsFloating<T>) {
      if (!json.is_number()) return complain(place, "is no number");
      to = T(json.get<double>());
    } else if constexpr ((std::same_as<Limits, Signed> || ...)) {
      if (!json.is_number_integer()) return complain(place, "is no whole number");
      to = json.get<T>();
    } else if constexpr (Number<T>) {
      const auto* number = json.get_ptr<const Json::number_unsigned_t*>();
      if (number == nullptr) return complain(place, "is no whole number");
      const Within wanted = limit(within<T>(), limits...);
      if (*number < wanted.least || *number > wanted.most)
        return complain(
            place, fmt::format("is {}, not within {}..{}", *number, wanted.least, wanted.most));
      if constexpr (std::same_as<T, Pid> || std::same_as<T, Tid>)
        to.value = static_cast<int>(*number);
      else
        to = static_cast<T>(*number);
    } else {
      if (!json.is_object()) return complain(place, "is no object");
      JsonReader reader(json, place, problem_);
      if constexpr (!std::is_empty_v<T>) fields(reader, to);
    }
  }

  template <class Variant, std::size_t... index>
  void choice(const Json& json, const Place& place, Variant& to,
              std::index_sequence<index...> /*all*/) {
    if (!json.is_object()) return complain(place, "is no object");
    JsonReader reader(json, place, problem_);
    std::size_t kind = 0;
    reader("kind", kind, Within{0, sizeof...(index) - 1});
    if (problem_.what.empty())
      (void)((kind == index && (reader("value", to.template emplace<index>()), true)) || ...);
  }

  bool has_size(std::size_t size, const Place& place, const char* of, Items wanted) {
    if (size >= wanted.least && size <= wanted.most) return true;
    complain(place, fmt::format("has {} {}, not {}..{}", size, of, wanted.least, wanted.most));
    return false;
  }

  const Json& object_;
  Place place_;
  Problem& problem_;
};

template <class T>
nlohmann::json record_to_json(const T& record) {
  return JsonWriter<nlohmann::json>::json_of(record);
}
// One line. Bytes that are no UTF-8 become U+FFFD.
inline std::string json_line(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
template <class T>
std::string record_to_text(const T& record) {
  return json_line(record_to_json(record));
}
// Nothing of what is damaged, or beyond the limits.
template <class T>
std::optional<T> record_from_text(std::string_view text, const JsonLimits& limits = {}) {
  JsonReader::Problem problem;
  T record = JsonReader::read<T>(parse_json(text, limits), problem);
  return problem.what.empty() ? std::optional<T>(std::move(record)) : std::nullopt;
}

}  // namespace stasis
