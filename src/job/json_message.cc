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
    result["error"].erase("obstacles");
    for (const char* part : {"message", "remedy"}) {
      auto text = result["error"].value(part, "");
      text.resize(std::min(text.size(), kRoom / 8));
      result["error"][part] = text;
    }
  }
  return result;
}

json error_to_json(const Error& error) {
  json out = {{"code", static_cast<int>(error.code)},
              {"message", error.to_string()},
              {"remedy", error.remedy}};
  for (const Obstacle& obstacle : error.obstacles) {
    out["obstacles"].push_back({{"id", obstacle.id.name()},
                                {"pid", obstacle.pid.value},
                                {"what", obstacle.what},
                                {"remedy", obstacle.remedy},
                                {"by", static_cast<int>(obstacle.by)}});
  }
  return out;
}

Error error_from_json(const json& object) {
  Error error{static_cast<ErrorCode>(object.value("code", static_cast<int>(ErrorCode::kInternal))),
              object.value("message", ""),
              object.value("remedy", ""),
              {},
              {}};
  for (const json& one : object.value("obstacles", json::array())) {
    // An id that only another version has is left out; the message has the obstacle all the same.
    const auto id = ObstacleId::find(one.value("id", ""));
    if (!id) continue;
    error.obstacles.push_back({*id, Severity::kRed, Pid{one.value("pid", 0)}, one.value("what", ""),
                               one.value("remedy", ""), static_cast<Override>(one.value("by", 0))});
  }
  return error;
}

}  // namespace stasis::job
