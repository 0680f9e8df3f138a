// A message between processes of this program, as JSON over a channel.
//
// Functions without state; any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/channel.h"
#include "base/error_record.h"
#include "base/fd.h"
#include "base/result.h"

namespace stasis::job {

template <class Value>
Result<void> send_message(const Channel& channel, const Value& value,
                          std::span<const UniqueFd> descriptors = {}) {
  const std::string text = record_to_text(value);
  return channel.send(std::as_bytes(std::span(text)), descriptors);
}

// Nothing of a malformed message.
template <class Value>
std::optional<Value> parse_message(const Channel::Message& message) {
  return record_from_text<Value>(
      {reinterpret_cast<const char*>(message.bytes.data()), message.bytes.size()});
}

// The same of any size: what no message holds is in a file that comes with it, after the other
// descriptors.
Result<void> send_text(const Channel& channel, const std::string& text,
                       std::vector<UniqueFd> descriptors);
template <class Value>
Result<void> send_any_size(const Channel& channel, const Value& value,
                           std::vector<UniqueFd> descriptors = {}) {
  return send_text(channel, record_to_text(value), std::move(descriptors));
}
// Leaves the other descriptors in the message. Nothing of a malformed one.
std::optional<std::string> receive_text(Channel::Message& message);
template <class Value>
std::optional<Value> parse_any_size(Channel::Message& message) {
  const auto text = receive_text(message);
  return text ? record_from_text<Value>(*text) : std::nullopt;
}

// The same error, or a shorter one, for a message, which holds so much and no more.
inline constexpr std::size_t kMessageRoom = Channel::kMostBytes / 2;
inline Error bounded(Error error) {
  if (record_to_text(error).size() <= kMessageRoom) return error;
  return shortened(std::move(error), kMessageRoom / 8);
}

// The same result: without its notes, and with a shorter error.
template <class Result>
Result bounded(Result result) {
  if (record_to_text(result).size() <= kMessageRoom) return result;
  result.notes.clear();
  if (auto* error = std::get_if<Error>(&result.what)) *error = shortened(*error, kMessageRoom / 8);
  return result;
}

// A path, which need not be UTF-8, on its way as bytes.
void path_field(auto& io, const char* key, Described<std::string> auto& text) {
  std::vector<unsigned char> bytes(text.begin(), text.end());
  io(key, bytes);
  if constexpr (std::remove_reference_t<decltype(io)>::kReads)
    text.assign(bytes.begin(), bytes.end());
}
void path_field(auto& io, const char* key, Described<std::optional<std::string>> auto& text) {
  using Bytes = std::optional<std::vector<unsigned char>>;
  Bytes bytes;
  if (text) bytes.emplace(text->begin(), text->end());
  io.optional(key, bytes);
  if constexpr (std::remove_reference_t<decltype(io)>::kReads)
    if (bytes) text.emplace(bytes->begin(), bytes->end());
}

// Does what the alternative of a variant calls for: std::visit(Cases{[](const A&) {...}, ...}, v).
template <class... Case>
struct Cases : Case... {
  using Case::operator()...;
};
template <class... Case>
Cases(Case...) -> Cases<Case...>;

}  // namespace stasis::job
