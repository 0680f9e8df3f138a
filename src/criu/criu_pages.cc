#include "criu/criu_pages.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <optional>

#include <fmt/format.h>

namespace stasis {
namespace {

// The magic numbers of every image and of a pagemap (criu/include/magic.h).
constexpr std::uint32_t kCommonMagic = 0x54564319;
constexpr std::uint32_t kPagemapMagic = 0x56084025;
// A pagemap begins with these, the length of a protobuf message, and the message, whose first field
// is the number of the pages file (images/pagemap.proto).
constexpr unsigned char kPagesId = 0x08;  // field 1, a varint

std::optional<std::uint32_t> pages_id(const UniqueFd& dir, const std::string& pagemap) {
  auto file = open_checked(dir.get(), pagemap, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return std::nullopt;
  std::array<unsigned char, 18> head{};
  if (::pread(file->get(), head.data(), head.size(), 0) < 14) return std::nullopt;
  std::array<std::uint32_t, 3> words{};
  std::memcpy(words.data(), head.data(), sizeof words);
  if (words[0] != kCommonMagic || words[1] != kPagemapMagic || words[2] < 2 ||
      head[12] != kPagesId) {
    return std::nullopt;
  }
  std::uint32_t id = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    const std::uint32_t byte = head[13 + i];
    id |= (byte & 0x7f) << (7 * i);
    if ((byte & 0x80) == 0) return id;
  }
  return std::nullopt;
}

}  // namespace

std::map<std::string, Pid> pages_owners(const UniqueFd& criu_dir, const Manifest& manifest) {
  std::map<std::string, Pid> out;
  const auto enter = [&](const std::string& pagemap, Pid owner) {
    if (const auto id = pages_id(criu_dir, pagemap))
      out.emplace(fmt::format("pages-{}.img", *id), owner);
  };
  for (const ProcessRecord& process : manifest.processes)
    enter(fmt::format("pagemap-{}.img", process.pid.value), process.pid);
  for (const FileRecord& file : manifest.files) {
    const std::string name = file.path.substr(file.path.find('/') + 1);
    if (name.starts_with("pagemap-shmem-")) enter(name, Pid{});
  }
  return out;
}

}  // namespace stasis
