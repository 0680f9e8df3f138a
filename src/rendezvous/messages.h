// What a part asks of the one that serves, and the answers. They come sealed (sealed_channel.h), so
// their sender has the secret; they are read within bounds all the same.
//
//   request: a byte (Verb), a byte (length of the name), the name, the text
//   answer:  a byte (Outcome), the text
//
// Stateless; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stasis::rendezvous {

enum class Verb : std::uint8_t {
  kHello = 1,  // text: the client's id, kIdBytes
  kRead,
  kWrite,
  kClaim,
  kNames,
  kRemove,  // text: names, each with a line end
};
enum class Outcome : std::uint8_t {
  kDone = 1,
  kText,   // of a record, or names
  kNone,   // no such record
  kTaken,  // the claim is another's
  kFull,   // more than the server keeps
};

inline constexpr std::size_t kIdBytes = 16;
inline constexpr std::size_t kMostRecordName = 80;
// Besides the text of a record: the verb and the name.
inline constexpr std::size_t kMostHead = 2 + kMostRecordName;

struct Request {
  Verb verb{};
  std::string name;
  std::string text;
};
struct Answer {
  Outcome outcome{};
  std::string text;
};

// As parts are called, and a little longer.
bool is_record_name(std::string_view name);

std::string to_bytes(const Request& request);
std::string to_bytes(const Answer& answer);
// Nothing for what is malformed: an unknown verb, a name that is none or does not fit the verb, a
// text that is too long.
std::optional<Request> request_from_bytes(std::string_view bytes);
std::optional<Answer> answer_from_bytes(std::string_view bytes);

std::string names_to_text(const std::vector<std::string>& names);
std::optional<std::vector<std::string>> names_from_text(std::string_view text);

}  // namespace stasis::rendezvous
