#include "criu/criu_memory_files.h"

#include <cstdint>
#include <string>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

constexpr const char* kImage = "memfd.img";
constexpr std::uint32_t kMagic = 0x48453499;  // criu/include/magic.h of CRIU 4.2
// Of its messages, images/memfd.proto.
constexpr protozero::pbf_tag_type kName = 1;
constexpr protozero::pbf_tag_type kMode = 9;

constexpr const char* kOfNoFile = "/dev/zero";  // the kernel's name
constexpr std::uint64_t kExecute = 0111;

bool is_of_no_file(protozero::pbf_reader message) {
  return message.next(kName) && message.get_view().to_string() == kOfNoFile;
}

std::string without_right(protozero::pbf_reader message) {
  std::string out;
  protozero::pbf_writer writer(out);
  while (message.next()) {
    if (message.tag() == kMode)
      writer.add_uint64(kMode, message.get_uint64() & ~kExecute);
    else
      copy_field(message, writer);
  }
  return out;
}

}  // namespace

Result<void> drop_execute_rights(const UniqueFd& criu_dir) {
  const std::string image = read_criu_image(criu_dir, kImage);
  constexpr std::size_t kHead = 8;
  if (image.size() < kHead) return {};
  std::string changed = image.substr(0, kHead);
  const bool is_whole = each_message(image, kMagic, [&](const protozero::pbf_reader& message) {
    append_message(changed, is_of_no_file(message)
                                ? without_right(message)
                                : std::string(message.data().data(), message.length()));
  });
  if (!is_whole || changed == image) return {};
  return replace_criu_image(criu_dir, kImage, changed);
}

}  // namespace stasis
