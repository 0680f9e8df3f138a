#include "direct/zero_survey.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

namespace stasis {
namespace {

std::optional<std::uint64_t> from_environment() {
  const char* given = std::getenv("STASIS_ZEROS_FROM");
  if (given == nullptr) return std::nullopt;
  const std::string_view text(given);
  std::uint64_t bytes = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (read.ec != std::errc{} || read.ptr != text.data() + text.size()) return std::nullopt;
  return bytes;
}

}  // namespace

std::uint64_t digests_from() { return from_environment().value_or(std::uint64_t{8} << 30); }
std::uint64_t survey_from() { return from_environment().value_or(std::uint64_t{32} << 30); }

Result<void> ZeroSurvey::deduplicate(std::uint64_t, std::span<std::byte> digests) {
  for (std::size_t at = 0; at < digests.size(); at += sizeof(direct::Digest)) {
    if (std::memcmp(&digests[at], zero_.data(), sizeof zero_) == 0) ++zeros_;
    digests[at] = std::byte{1};
  }
  return {};
}

}  // namespace stasis
