#include "direct/mover_protocol.h"

#include <cstring>
#include <string>

#include "base/error_record.h"

namespace stasis::direct::protocol {

std::optional<Kind> kind_of(std::span<const std::byte> message) {
  Kind kind{};
  if (message.size() < sizeof kind) return std::nullopt;
  std::memcpy(&kind, message.data(), sizeof kind);
  return kind;
}

std::vector<std::byte> failed(const Error& error) {
  constexpr std::size_t kLongestText = 4096;
  const std::string text = record_to_text(shortened(error, kLongestText));
  return with_items(Failed{}, std::span<const char>(text));
}

std::optional<Error> error_of(std::span<const std::byte> message) {
  Failed head;
  std::vector<char> text;
  if (kind_of(message) != Kind::kFailed || !take_items(message, head, text)) return std::nullopt;
  return record_from_text<Error>({text.data(), text.size()});
}

}  // namespace stasis::direct::protocol
