#include "criu/criu_pages.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis {
namespace {

// The magic numbers of every image and of a pagemap (criu/include/magic.h).
constexpr std::uint32_t kCommonMagic = 0x54564319;
constexpr std::uint32_t kPagemapMagic = 0x56084025;
// A pagemap begins with these, the length of a protobuf message, and the message, whose first field
// is the number of the pages file (images/pagemap.proto).
constexpr unsigned char kPagesId = 0x08;  // field 1, a varint

std::optional<std::uint32_t> pages_id(const UniqueFd& dir, Pid pid) {
  auto file = open_file(dir.get(), fmt::format("pagemap-{}.img", pid.value),
                        O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat info = {};
  if (!file || ::fstat(file->get(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
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

std::map<std::string, Pid> pages_owners(const std::string& criu_dir, const Manifest& manifest) {
  std::map<std::string, Pid> out;
  auto dir = open_file(AT_FDCWD, criu_dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!dir) return out;
  for (const ProcessRecord& process : manifest.processes) {
    if (const auto id = pages_id(*dir, process.pid))
      out.emplace(fmt::format("pages-{}.img", *id), process.pid);
  }
  return out;
}

}  // namespace stasis
