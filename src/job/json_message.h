// A message between processes of this program, as JSON over a channel.
//
// Functions without state; any thread.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/channel.h"
#include "base/fd.h"
#include "base/result.h"

namespace stasis::job {

// Bytes that are not UTF-8 arrive as U+FFFD.
inline Result<void> send_json(const Channel& channel, const nlohmann::json& message,
                              std::span<const UniqueFd> descriptors = {}) {
  const std::string text = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return channel.send(std::as_bytes(std::span(text)), descriptors);
}

// What `read` makes of the message; nothing if that is not what was agreed on.
template <class Value>
std::optional<Value> parse_json(
    const Channel::Message& message,
    const std::function<std::optional<Value>(const nlohmann::json&)>& read) {
  const std::string_view text(reinterpret_cast<const char*>(message.bytes.data()),
                              message.bytes.size());
  const nlohmann::json parsed = nlohmann::json::parse(text, nullptr, false);
  if (!parsed.is_object()) return std::nullopt;
  try {
    return read(parsed);
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

// A message holds so much and no more: leaves the notes out, and shortens the error.
nlohmann::json bounded(nlohmann::json result);

// An error on its way.
nlohmann::json error_to_json(const Error& error);
Error error_from_json(const nlohmann::json& object);

// Does what the alternative of a variant calls for: std::visit(Cases{[](const A&) {...}, ...}, v).
template <class... Case>
struct Cases : Case... {
  using Case::operator()...;
};
template <class... Case>
Cases(Case...) -> Cases<Case...>;

}  // namespace stasis::job
