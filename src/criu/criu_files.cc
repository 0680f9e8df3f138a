#include "criu/criu_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <protozero/exception.hpp>
#include <protozero/pbf_reader.hpp>

namespace stasis {
namespace {

// criu/include/magic.h; images/fdinfo.proto, regfile.proto and remap-file-path.proto, CRIU 4.2.
constexpr std::uint32_t kAnyImageMagic = 0x54564319;
constexpr std::uint32_t kFilesMagic = 0x56303138;
constexpr std::uint32_t kRemapMagic = 0x59133954;
constexpr std::uint64_t kRegularType = 1;  // of an entry of files.img: also directories
constexpr std::uint64_t kRemapLinked = 0;
constexpr std::size_t kMostBytes = 64 << 20;

std::string read_image(const UniqueFd& dir, const std::string& name) {
  auto file = open_file(dir.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat info {};
  if (!file || ::fstat(file->get(), &info) != 0 || !S_ISREG(info.st_mode)) return {};
  auto text = read_file(*file, name, kMostBytes);
  return text ? std::move(*text) : std::string();
}

// Calls `take` with each message of an image.
template <typename Take>
void each_message(const std::string& image, std::uint32_t magic, const Take& take) {
  const auto word = [&](std::size_t at) {
    std::uint32_t value = 0;
    std::memcpy(&value, image.data() + at, sizeof value);
    return value;
  };
  constexpr std::size_t kHead = 8;
  if (image.size() < kHead || word(0) != kAnyImageMagic || word(4) != magic) return;
  std::size_t at = kHead;
  while (image.size() - at >= 4) {
    const std::size_t size = word(at);
    at += 4;
    if (size > image.size() - at) return;
    try {
      take(protozero::pbf_reader(image.data() + at, size));
    } catch (const protozero::exception&) {
      return;  // criu says so, too
    }
    at += size;
  }
}

struct RegularEntry {
  NeededFile file;
  bool elsewhere = false;  // on a mount of the image's, or outside of CRIU's hands
};

// Fields by their numbers; throws what protozero throws.
RegularEntry parse_regular(protozero::pbf_reader message) {
  RegularEntry out;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case protozero::tag_and_type(6, protozero::pbf_wire_type::length_delimited):
        out.file.path = message.get_string();
        break;
      case protozero::tag_and_type(7, protozero::pbf_wire_type::varint):  // mnt_id
        out.elsewhere |= message.get_int32() != -1;
        break;
      case protozero::tag_and_type(8, protozero::pbf_wire_type::varint):
        out.file.size = message.get_uint64();
        break;
      case protozero::tag_and_type(9, protozero::pbf_wire_type::varint):  // ext
        out.elsewhere |= message.get_bool();
        break;
      case protozero::tag_and_type(10, protozero::pbf_wire_type::varint):
        out.file.mode = message.get_uint32();
        break;
      default:
        message.skip();
    }
  }
  return out;
}

}  // namespace

std::vector<NeededFile> needed_files(const UniqueFd& criu_dir) {
  using Wire = protozero::pbf_wire_type;
  std::map<std::uint64_t, RegularEntry> entries;
  each_message(read_image(criu_dir, "files.img"), kFilesMagic, [&](protozero::pbf_reader message) {
    std::uint64_t type = 0;
    std::uint64_t id = 0;
    std::optional<protozero::pbf_reader> regular;
    while (message.next()) {
      switch (message.tag_and_type()) {
        case protozero::tag_and_type(1, Wire::varint):
          type = message.get_uint64();
          break;
        case protozero::tag_and_type(2, Wire::varint):
          id = message.get_uint64();
          break;
        case protozero::tag_and_type(3, Wire::length_delimited):
          regular = message.get_message();
          break;
        default:
          message.skip();
      }
    }
    if (type == kRegularType && regular) entries.emplace(id, parse_regular(*regular));
  });
  std::set<std::uint64_t> nameless;  // those that are found by something else
  const auto take_remap = [&](protozero::pbf_reader message) {
    std::map<protozero::pbf_tag_type, std::uint64_t> fields;  // orig_id, remap_id, remap_type
    while (message.next()) {
      const auto tag = message.tag();
      if (message.wire_type() == Wire::varint)
        fields[tag] = message.get_uint64();
      else
        message.skip();
    }
    nameless.insert(fields[1]);
    const auto it = entries.find(fields[2]);
    if (fields[3] == kRemapLinked && it != entries.end()) it->second.file.of_criu = true;
  };
  each_message(read_image(criu_dir, "remap-fpath.img"), kRemapMagic, take_remap);
  std::vector<NeededFile> out;
  for (auto& [id, entry] : entries) {
    const std::string& path = entry.file.path;
    if (entry.elsewhere || nameless.contains(id) || !path.starts_with('/') ||
        path.starts_with("/proc/") || path.find('\0') != std::string::npos) {
      continue;
    }
    out.push_back(std::move(entry.file));
  }
  return out;
}

std::optional<std::string> what_is_wrong(const NeededFile& file) {
  struct stat info {};
  if (::stat(file.path.c_str(), &info) != 0) {
    if (errno != ENOENT && errno != ENOTDIR) return std::nullopt;
    return "is not there";
  }
  if (file.mode && (*file.mode & S_IFMT) != (info.st_mode & S_IFMT))
    return "is a file of another kind";
  if (file.size && S_ISREG(info.st_mode) &&
      static_cast<std::uint64_t>(info.st_size) != *file.size) {
    return fmt::format("has {} bytes, and had {} at the dump", info.st_size, *file.size);
  }
  if (file.mode && *file.mode != info.st_mode) {
    constexpr unsigned kPermissions = 07777;
    return fmt::format("has the mode {:o}, and had {:o} at the dump", info.st_mode & kPermissions,
                       *file.mode & kPermissions);
  }
  return std::nullopt;
}

}  // namespace stasis
