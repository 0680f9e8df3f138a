#include "criu/criu_messages.h"

#include <fcntl.h>

namespace stasis {

std::string read_criu_image(const UniqueFd& dir, const std::string& name) {
  constexpr std::size_t kMostBytes = 64 << 20;
  auto file = open_checked(dir.get(), name, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return {};
  auto text = read_file(*file, name, kMostBytes);
  return text ? std::move(*text) : std::string();
}

void append_message(std::string& image, std::string_view message) {
  const auto size = static_cast<std::uint32_t>(message.size());
  image.append(reinterpret_cast<const char*>(&size), sizeof size);
  image += message;
}

}  // namespace stasis
