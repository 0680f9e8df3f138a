#include "criu/criu_messages.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>

#include <fmt/format.h>

namespace stasis {

std::string read_criu_image(const UniqueFd& dir, const std::string& name, std::size_t most) {
  auto file = open_checked(dir.get(), name, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return {};
  auto text = read_file(*file, name, most);
  return text ? std::move(*text) : std::string();
}

void append_message(std::string& image, std::string_view message) {
  const auto size = static_cast<std::uint32_t>(message.size());
  image.append(reinterpret_cast<const char*>(&size), sizeof size);
  image += message;
}

void copy_field(protozero::pbf_reader& message, protozero::pbf_writer& writer) {
  using Wire = protozero::pbf_wire_type;
  const auto tag = message.tag();
  switch (message.wire_type()) {
    case Wire::varint:
      writer.add_uint64(tag, message.get_uint64());
      break;
    case Wire::fixed64:
      writer.add_fixed64(tag, message.get_fixed64());
      break;
    case Wire::fixed32:
      writer.add_fixed32(tag, message.get_fixed32());
      break;
    default:
      writer.add_bytes(tag, message.get_view());
  }
}

Result<void> replace_criu_image(const UniqueFd& criu_dir, const std::string& name,
                                const std::string& image) {
  const std::string other = name + ".new";
  STASIS_TRY_ASSIGN(
      auto file, open_file(criu_dir.get(), other, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  auto done = write_all(file.get(), image.data(), image.size(), other);
  if (done) done = file.close(other);
  if (done && ::renameat(criu_dir.get(), other.c_str(), criu_dir.get(), name.c_str()) != 0)
    done = fail(errno_error(fmt::format("cannot rename {}", other), errno));
  return done;
}

Result<void> replace_files_image(const UniqueFd& criu_dir, const std::string& image) {
  return replace_criu_image(criu_dir, kFilesImage, image);
}

}  // namespace stasis
