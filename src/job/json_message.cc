#include "job/json_message.h"

#include <sys/mman.h>
#include <unistd.h>

namespace stasis::job {
namespace {

// Instead of a text.
constexpr std::string_view kInFile = "in a file";
constexpr std::size_t kMostInFile = 256 << 20;  // bytes

}  // namespace

Result<void> send_text(const Channel& channel, const std::string& text,
                       std::vector<UniqueFd> descriptors) {
  if (text.size() <= Channel::kMostBytes)
    return channel.send(std::as_bytes(std::span(text)), descriptors);
  UniqueFd file(::memfd_create("stasis-message", MFD_CLOEXEC));
  if (!file.valid()) return fail(errno_error("cannot make a file for a message", errno));
  STASIS_TRY(write_all(file.get(), text.data(), text.size(), "a message"));
  descriptors.push_back(std::move(file));
  return channel.send(std::as_bytes(std::span(kInFile)), descriptors);
}

std::optional<std::string> receive_text(Channel::Message& message) {
  const std::string_view sent{reinterpret_cast<const char*>(message.bytes.data()),
                              message.bytes.size()};
  if (sent != kInFile) return std::string(sent);
  if (message.descriptors.empty()) return std::nullopt;
  const UniqueFd file = std::move(message.descriptors.back());
  message.descriptors.pop_back();
  (void)::lseek(file.get(), 0, SEEK_SET);
  auto text = read_file(file, "a message", kMostInFile);
  return text ? std::optional(std::move(*text)) : std::nullopt;
}

}  // namespace stasis::job
