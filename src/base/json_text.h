// JSON of other users' making, read within bounds: nlohmann's tree takes up to 130 bytes for a
// value of which the text needs three ("{},": 60 MiB of those took 2.2 GB), and copies nested
// values recursively.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace stasis {

struct JsonLimits {
  std::size_t values = 2U << 20;  // and keys
  std::size_t depth = 64;
};

// Why it is not read: no JSON, nested deeper or with more values than that, or a key twice in one
// object, of which readers take one or the other. Empty if it can be. Takes no memory for the
// values.
std::string json_problem(std::string_view text, const JsonLimits& limits = {});

// Discarded (`is_discarded()`) if it has a problem.
nlohmann::json parse_json(std::string_view text, const JsonLimits& limits = {});

}  // namespace stasis
