#include "rendezvous/messages.h"

#include "group/group_rendezvous.h"

namespace stasis::rendezvous {
namespace {

bool is_of_a_record(Verb verb) {
  return verb == Verb::kRead || verb == Verb::kWrite || verb == Verb::kClaim;
}
bool has_text(Verb verb) { return verb != Verb::kRead && verb != Verb::kNames; }

}  // namespace

bool is_record_name(std::string_view name) {
  constexpr std::string_view kKnown =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name.size() <= kMostRecordName &&
         name.find_first_not_of(kKnown) == std::string_view::npos;
}

std::string to_bytes(const Request& request) {
  std::string out;
  out.push_back(static_cast<char>(request.verb));
  out.push_back(static_cast<char>(request.name.size()));
  return out.append(request.name).append(request.text);
}

std::string to_bytes(const Answer& answer) {
  return std::string(1, static_cast<char>(answer.outcome)).append(answer.text);
}

std::optional<Request> request_from_bytes(std::string_view bytes) {
  if (bytes.size() < 2) return std::nullopt;
  const auto number = static_cast<std::uint8_t>(bytes[0]);
  const std::size_t length = static_cast<std::uint8_t>(bytes[1]);
  bytes.remove_prefix(2);
  if (number < static_cast<std::uint8_t>(Verb::kHello) ||
      number > static_cast<std::uint8_t>(Verb::kRemove) || length > bytes.size())
    return std::nullopt;
  Request out{static_cast<Verb>(number), std::string(bytes.substr(0, length)),
              std::string(bytes.substr(length))};
  const bool fits = (is_of_a_record(out.verb) ? is_record_name(out.name) : out.name.empty()) &&
                    (has_text(out.verb) ? out.text.size() <= kMostGroupRecord : out.text.empty()) &&
                    (out.verb != Verb::kHello || out.text.size() == kIdBytes);
  if (!fits) return std::nullopt;
  return out;
}

std::optional<Answer> answer_from_bytes(std::string_view bytes) {
  if (bytes.empty() || bytes.size() - 1 > kMostGroupRecord) return std::nullopt;
  const auto number = static_cast<std::uint8_t>(bytes[0]);
  if (number < static_cast<std::uint8_t>(Outcome::kDone) ||
      number > static_cast<std::uint8_t>(Outcome::kFull))
    return std::nullopt;
  return Answer{static_cast<Outcome>(number), std::string(bytes.substr(1))};
}

std::string names_to_text(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names)
    out.append(name).push_back('\n');
  return out;
}

std::optional<std::vector<std::string>> names_from_text(std::string_view text) {
  std::vector<std::string> out;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos || out.size() == kMostGroupNames ||
        !is_record_name(text.substr(0, end)))
      return std::nullopt;
    out.emplace_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return out;
}

}  // namespace stasis::rendezvous
