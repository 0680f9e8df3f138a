#include "criu/criu_deleted.h"

#include <fcntl.h>
#include <linux/limits.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "criu/criu_messages.h"
#include "proc/served_files.h"

namespace stasis {
namespace {

// criu/include/magic.h; images/remap-file-path.proto, ghost-file.proto, fdinfo.proto and
// regfile.proto, CRIU 4.2.
constexpr std::uint32_t kGhostMagic = 0x52583605;
constexpr std::uint64_t kGhost = 1;  // remap_type
constexpr std::uint32_t kIdTag = 2;
constexpr std::uint32_t kRegularTag = 3;
constexpr std::uint32_t kNameTag = 6;
constexpr std::uint32_t kMountField = 7;

// By the number of a file in files.img, that of the deleted one which CRIU has saved.
std::map<std::uint64_t, std::uint64_t> deleted_files(const UniqueFd& criu_dir) {
  std::map<std::uint64_t, std::uint64_t> out;
  (void)each_message(read_criu_image(criu_dir, "remap-fpath.img"), kRemapMagic,
                     [&](protozero::pbf_reader message) {
                       std::array<std::uint64_t, 4> fields{};
                       while (message.next())
                         if (message.wire_type() == protozero::pbf_wire_type::varint &&
                             message.tag() < fields.size())
                           fields[message.tag()] = message.get_uint64();
                         else
                           message.skip();
                       if (fields[3] == kGhost) out.emplace(fields[1], fields[2]);
                     });
  return out;
}

// The file's content stands behind the one message that tells of it.
bool is_directory(const UniqueFd& criu_dir, std::uint64_t number) {
  constexpr std::size_t kHead = 4096;
  const auto file = open_checked(criu_dir.get(), fmt::format("ghost-file-{:x}.img", number),
                                 O_RDONLY, &is_regular_file);
  std::string head(kHead, '\0');
  const ssize_t got = file ? ::pread(file->get(), head.data(), head.size(), 0) : -1;
  if (got <= 0) return false;
  head.resize(static_cast<std::size_t>(got));
  bool is_first = true;
  bool found = false;
  (void)each_message(head, kGhostMagic, [&](protozero::pbf_reader message) {
    if (is_first && message.next(3, protozero::pbf_wire_type::varint))
      found = S_ISDIR(message.get_uint32());
    is_first = false;
  });
  return found;
}

bool is_there(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

// Without its last slash; that of "/" is "".
std::string nearest_folder(std::string path) {
  struct stat info {};
  do
    path = folder_of(path);
  while (!path.empty() && (::stat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)));
  return path;
}

// "name.stasis-1a2b3c4d-5" without what an earlier dump has put behind it.
std::string without_tag(const std::string& name) {
  constexpr std::string_view kBegin = ".stasis-";
  constexpr std::string_view kDigits = "0123456789abcdef";
  constexpr std::size_t kRandom = 8;
  const std::size_t at = name.rfind(kBegin);
  if (at == std::string::npos || at == 0) return name;
  const std::string rest = name.substr(at + kBegin.size());
  const bool is_ours = rest.size() > kRandom + 1 && rest[kRandom] == '-' &&
                       rest.find_first_not_of(kDigits) == kRandom &&
                       rest.find_first_not_of(kDigits, kRandom + 1) == std::string::npos;
  return is_ours ? name.substr(0, at) : name;
}

// A name that CRIU can make where it has that one.
std::optional<std::string> better_name(const std::string& path, std::uint64_t number,
                                       bool directory, const std::string& tag) {
  const std::string made = fmt::format("{}.cr.{:x}.ghost", path, number);
  const std::string folder = nearest_folder(path);
  const std::string name = without_tag(path.substr(path.rfind('/') + 1));
  const bool fits = made.size() - path.rfind('/') - 1 <= NAME_MAX && made.size() < PATH_MAX;
  if (!directory && fits && folder == folder_of(path) && !is_there(made) &&
      !(is_there(path) && is_there(path + ".cr_link")))
    return std::nullopt;
  constexpr std::size_t kKept = 200;
  return fmt::format("{}/{}{}{:x}", folder, name.substr(0, kKept), tag, number);
}

// The name of a regular file's entry, if it is one of our own mounts.
std::optional<std::string> name_in(protozero::pbf_reader message) {
  std::optional<std::string> out;
  bool elsewhere = false;
  while (message.next()) {
    if (message.tag() == kNameTag &&
        message.wire_type() == protozero::pbf_wire_type::length_delimited)
      out = message.get_string();
    else if (message.tag() == kMountField &&
             message.wire_type() == protozero::pbf_wire_type::varint)
      elsewhere |= message.get_int32() != -1;
    else
      message.skip();
  }
  const bool is_ours = out && !elsewhere && out->starts_with('/') &&
                       out->find('\0') == std::string::npos &&
                       !proc::leads_over_served(Pid{::getpid()}, *out);
  return is_ours ? out : std::nullopt;
}

std::string with_name(protozero::pbf_reader message, const std::string& name) {
  std::string out;
  protozero::pbf_writer writer(out);
  while (message.next()) {
    if (message.tag() == kNameTag) {
      message.skip();
      writer.add_string(kNameTag, name);
    } else {
      copy_field(message, writer);
    }
  }
  return out;
}

}  // namespace

Result<void> rename_deleted(const UniqueFd& criu_dir) {
  const auto deleted = deleted_files(criu_dir);
  if (deleted.empty()) return {};
  std::uint32_t random = 0;
  (void)!::getrandom(&random, sizeof random, 0);
  const std::string tag = fmt::format(".stasis-{:08x}-", random);
  std::map<std::uint64_t, bool> directories;
  for (const auto& [file, number] : deleted)
    if (const auto [one, is_new] = directories.try_emplace(number, false); is_new)
      one->second = is_directory(criu_dir, number);
  const std::string image = read_criu_image(criu_dir, kFilesImage);
  std::string out = image.substr(0, 8);
  bool is_needed = false;
  const bool whole = each_message(image, kFilesMagic, [&](const protozero::pbf_reader& message) {
    std::uint64_t id = 0;
    for (protozero::pbf_reader entry = message;
         entry.next(kIdTag, protozero::pbf_wire_type::varint);)
      id = entry.get_uint64();
    const auto number = deleted.find(id);
    std::string changed;
    protozero::pbf_writer writer(changed);
    for (protozero::pbf_reader entry = message; entry.next();) {
      if (entry.tag() != kRegularTag ||
          entry.wire_type() != protozero::pbf_wire_type::length_delimited ||
          number == deleted.end()) {
        copy_field(entry, writer);
        continue;
      }
      const protozero::data_view regular = entry.get_view();
      const auto name = name_in(protozero::pbf_reader(regular));
      const auto better =
          name ? better_name(*name, number->second, directories.at(number->second), tag)
               : std::nullopt;
      is_needed |= better.has_value();
      if (better)
        writer.add_message(kRegularTag, with_name(protozero::pbf_reader(regular), *better));
      else
        writer.add_bytes(kRegularTag, regular);
    }
    append_message(out, changed);
  });
  if (!whole || !is_needed) return {};
  return replace_files_image(criu_dir, out);
}

}  // namespace stasis
