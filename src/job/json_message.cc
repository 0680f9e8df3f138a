#include "job/json_message.h"

#include <algorithm>
#include <string>

namespace stasis::job {

using nlohmann::json;

json bounded(json result) {
  constexpr std::size_t kRoom = Channel::kMostBytes / 2;
  if (result.dump(-1, ' ', false, json::error_handler_t::replace).size() <= kRoom) return result;
  result.erase("notes");
  if (result.contains("error")) {
    for (const char* part : {"message", "remedy"}) {
      auto text = result["error"].value(part, "");
      text.resize(std::min(text.size(), kRoom / 8));
      result["error"][part] = text;
    }
  }
  return result;
}

json error_to_json(const Error& error) {
  return {{"code", static_cast<int>(error.code)},
          {"message", error.to_string()},
          {"remedy", error.remedy}};
}

Error error_from_json(const json& object) {
  Error error{static_cast<ErrorCode>(object.value("code", static_cast<int>(ErrorCode::kInternal))),
              object.value("message", ""),
              object.value("remedy", ""),
              {},
              {}};
  return error;
}

}  // namespace stasis::job
