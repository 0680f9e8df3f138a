// Long because all that is read of files.img, and changed in it, goes by the same forms.
#include "criu/criu_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <protozero/exception.hpp>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "criu/criu_messages.h"
#include "image/directory.h"

namespace stasis {
namespace {

// criu/include/magic.h; images/fdinfo.proto, regfile.proto and remap-file-path.proto, CRIU 4.2.
constexpr std::uint64_t kRegularType = 1;  // of an entry of files.img: also directories
constexpr std::uint64_t kRemapLinked = 0;

struct RegularEntry {
  NeededFile file;
  bool elsewhere = false;  // on a mount of the image's, or outside of CRIU's hands
};

// Fields by their numbers; throws what protozero throws.
RegularEntry parse_regular(protozero::pbf_reader message) {
  RegularEntry out;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case protozero::tag_and_type(2, protozero::pbf_wire_type::varint):
        out.file.flags = message.get_uint32();
        break;
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

constexpr std::uint32_t kNameField = 6;  // of a regular file's entry

// The same message with one text field of another value; what is not known is copied as it is.
// `change` returns nothing for a field that stays.
template <typename Change>
std::string copy_message(protozero::pbf_reader message, const Change& change) {
  std::string out;
  protozero::pbf_writer writer(out);
  while (message.next()) {
    if (message.wire_type() != protozero::pbf_wire_type::length_delimited) {
      copy_field(message, writer);
      continue;
    }
    const auto tag = message.tag();
    const protozero::data_view value = message.get_view();
    const std::optional<std::string> other = change(tag, value);
    writer.add_bytes(tag, other ? protozero::data_view(*other) : value);
  }
  return out;
}

// An entry of files.img in which a name of `names` is another one.
std::string renamed_entry(const protozero::pbf_reader& entry,
                          const std::map<std::string, std::string>& names) {
  constexpr std::uint32_t kRegularField = 3;
  return copy_message(
      entry, [&](std::uint32_t outer, protozero::data_view inner) -> std::optional<std::string> {
        if (outer != kRegularField) return std::nullopt;
        return copy_message(
            protozero::pbf_reader(inner),
            [&](std::uint32_t tag, protozero::data_view value) -> std::optional<std::string> {
              if (tag != kNameField) return std::nullopt;
              const auto it = names.find(std::string(value.data(), value.size()));
              return it == names.end() ? std::nullopt : std::optional(it->second);
            });
      });
}

constexpr std::uint64_t kListens = 10;  // TCP_LISTEN

struct UnixSocket {
  std::uint64_t inode = 0;
  std::uint64_t state = 0;
  std::uint64_t peer = 0;  // the inode of the other end, or of the listener that has not accepted
};

// Of an entry of files.img, if it is one (file_entry and unix_sk_entry of images/).
std::optional<UnixSocket> unix_socket_of(protozero::pbf_reader entry) {
  using Wire = protozero::pbf_wire_type;
  if (!entry.next(16, Wire::length_delimited)) return std::nullopt;
  protozero::pbf_reader message = entry.get_message();
  UnixSocket out;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case protozero::tag_and_type(2, Wire::varint):
        out.inode = message.get_uint64();
        break;
      case protozero::tag_and_type(4, Wire::varint):
        out.state = message.get_uint64();
        break;
      case protozero::tag_and_type(8, Wire::varint):
        out.peer = message.get_uint64();
        break;
      default:
        message.skip();
    }
  }
  return out;
}

// What files.img and remap-fpath.img say of the files that CRIU opens by name.
struct Entries {
  std::map<std::uint64_t, RegularEntry> regular;
  std::set<std::uint64_t> nameless;  // those that are found by something else
  std::vector<std::string> sockets;  // the names of unix sockets
  bool whole = false;                // all could be read, and were not too many
};

// To what a unix socket is bound; nothing if it has no name, or one that is no file's.
std::optional<std::string> socket_name(protozero::pbf_reader message) {
  using Wire = protozero::pbf_wire_type;
  std::string name;
  std::string folder;
  bool elsewhere = false;  // on a mount of the image's
  while (message.next()) {
    switch (message.tag_and_type()) {
      case protozero::tag_and_type(11, Wire::length_delimited):
        name = message.get_string();
        break;
      case protozero::tag_and_type(14, Wire::length_delimited):
        folder = message.get_string();
        break;
      case protozero::tag_and_type(17, Wire::varint):  // mnt_id
        elsewhere = message.get_int32() != -1;
        break;
      default:
        message.skip();
    }
  }
  if (elsewhere || name.empty() || name.front() == '\0') return std::nullopt;
  name = name.substr(0, name.find('\0'));
  return name.starts_with('/') ? name : fmt::format("{}/{}", folder, name);
}

// A program has some thousands; each takes some hundred bytes of ours.
constexpr std::size_t kMostNames = 1U << 21;
// A program may have a million sockets, which are in the same list.
constexpr std::size_t kMostOfList = 256U << 20;

// `most`: bytes of files.img.
Entries read_entries(const UniqueFd& criu_dir, std::size_t most) {
  using Wire = protozero::pbf_wire_type;
  Entries out;
  const auto take_file = [&](protozero::pbf_reader message) {
    if (out.regular.size() + out.sockets.size() >= kMostNames) return;
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
        case protozero::tag_and_type(16, Wire::length_delimited):
          if (auto name = socket_name(message.get_message()))
            out.sockets.push_back(std::move(*name));
          break;
        default:
          message.skip();
      }
    }
    if (type == kRegularType && regular) out.regular.emplace(id, parse_regular(*regular));
  };
  out.whole = each_message(read_criu_image(criu_dir, kFilesImage, most), kFilesMagic, take_file) &&
              out.regular.size() + out.sockets.size() < kMostNames;
  const auto take_remap = [&](protozero::pbf_reader message) {
    std::map<protozero::pbf_tag_type, std::uint64_t> fields;  // orig_id, remap_id, remap_type
    while (message.next()) {
      const auto tag = message.tag();
      if (message.wire_type() == Wire::varint)
        fields[tag] = message.get_uint64();
      else
        message.skip();
    }
    out.nameless.insert(fields[1]);
    const auto it = out.regular.find(fields[2]);
    if (fields[3] != kRemapLinked || it == out.regular.end()) return;
    it->second.file.of_criu = true;
    // CRIU notes no mount for the name that it makes: it is on that of the file.
    if (const auto file = out.regular.find(fields[1]); file != out.regular.end())
      it->second.elsewhere |= file->second.elsewhere;
  };
  each_message(read_criu_image(criu_dir, "remap-fpath.img"), kRemapMagic, take_remap);
  return out;
}

// Is it a name that leads to the same on this machine?
bool is_looked_up(const RegularEntry& entry) {
  const std::string& path = entry.file.path;
  return !entry.elsewhere && path.starts_with('/') && !path.starts_with("/proc/") &&
         path.find('\0') == std::string::npos;
}

Error unreadable(const std::string& name) {
  return {ErrorCode::kImageCorrupt, fmt::format("CRIU's {} cannot be parsed", name)};
}

constexpr std::uint32_t kIdsMagic = 0x54432030;
constexpr std::uint32_t kMemoryMagic = 0x57492820;
constexpr std::uint32_t kFoldersMagic = 0x51403912;

// The fields of a message that are numbers, each the last of its tag.
std::map<protozero::pbf_tag_type, std::uint64_t> numbers_of(protozero::pbf_reader message) {
  std::map<protozero::pbf_tag_type, std::uint64_t> out;
  while (message.next()) {
    const auto tag = message.tag();
    if (message.wire_type() == protozero::pbf_wire_type::varint)
      out[tag] = message.get_uint64();
    else
      message.skip();
  }
  return out;
}

}  // namespace

Result<OpenedFiles> OpenedFiles::read(const UniqueFd& criu_dir) {
  Entries entries = read_entries(criu_dir, kMostOfList);
  if (!entries.whole) return fail(unreadable(kFilesImage));
  OpenedFiles out;
  out.names_ = std::move(entries.sockets);
  for (auto& [id, entry] : entries.regular) {
    if (!is_looked_up(entry)) continue;
    // A link that was open itself (O_PATH and O_NOFOLLOW) is not followed.
    const bool is_link = entry.file.mode && S_ISLNK(*entry.file.mode);
    out.names_.push_back(
        entry.file.path.substr(0, is_link ? entry.file.path.rfind('/') : std::string::npos));
    out.by_id_.emplace(id, Name{std::move(entry.file.path), entries.nameless.contains(id)});
  }
  return out;
}

// images/core.proto (task_kobj_ids_entry), fdinfo.proto, fs.proto, mm.proto and vma.proto,
// CRIU 4.2.
Result<std::vector<OpenedFile>> OpenedFiles::of(const UniqueFd& criu_dir, int number) const {
  std::vector<OpenedFile> out;
  const auto add = [&](std::uint64_t id, std::string place, std::uint64_t start = 0) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return;
    out.push_back({std::move(place), start, it->second.path, it->second.loses});
  };
  const auto each = [&](const std::string& name, std::uint32_t magic,
                        const auto& take) -> Result<void> {
    if (each_message(read_criu_image(criu_dir, name, kMostOfList), magic, take)) return {};
    return fail(unreadable(name));
  };
  std::uint64_t table = 0;
  STASIS_TRY(each(fmt::format("ids-{}.img", number), kIdsMagic,
                  [&](const protozero::pbf_reader& message) { table = numbers_of(message)[2]; }));
  STASIS_TRY(each(fmt::format("fdinfo-{}.img", table), kDescriptorsMagic,
                  [&](const protozero::pbf_reader& message) {
                    constexpr std::uint64_t kFifo = 3;
                    auto fields = numbers_of(message);
                    if (fields[3] == kRegularType || fields[3] == kFifo)
                      add(fields[1], fmt::format("fd/{}", fields[4]));
                  }));
  STASIS_TRY(each(fmt::format("fs-{}.img", number), kFoldersMagic,
                  [&](const protozero::pbf_reader& message) {
                    auto fields = numbers_of(message);
                    add(fields[1], "cwd");
                    add(fields[2], "root");
                  }));
  STASIS_TRY(
      each(fmt::format("mm-{}.img", number), kMemoryMagic, [&](protozero::pbf_reader message) {
        constexpr std::uint64_t kOfFile = 1U << 6 | 1U << 7;  // VMA_FILE_PRIVATE, VMA_FILE_SHARED
        add(numbers_of(message)[12], "exe");
        while (message.next(14, protozero::pbf_wire_type::length_delimited)) {
          auto fields = numbers_of(message.get_message());
          if ((fields[7] & kOfFile) != 0) add(fields[4], "map_files", fields[1]);
        }
      }));
  return out;
}

namespace {

// The files, by their numbers in files.img, of which a process has a part mapped that it shares and
// may write to: CRIU notes no flags with a file that is only mapped (mm.proto, vma.proto).
std::set<std::uint64_t> written_where_mapped(const UniqueFd& criu_dir) {
  constexpr std::uint64_t kShared = 1U << 7;  // VMA_FILE_SHARED
  std::set<std::uint64_t> out;
  const auto listed = open_file(criu_dir.get(), ".", O_RDONLY | O_DIRECTORY);
  const auto names = listed ? list_directory(*listed, "criu") : Result<std::vector<std::string>>();
  if (!names) return out;
  for (const std::string& name : *names) {
    if (!name.starts_with("mm-")) continue;
    (void)each_message(read_criu_image(criu_dir, name, kMostOfList), kMemoryMagic,
                       [&](protozero::pbf_reader message) {
                         while (message.next(14, protozero::pbf_wire_type::length_delimited)) {
                           auto fields = numbers_of(message.get_message());
                           const bool writes = fields[10] != 0 ? (fields[10] & O_ACCMODE) == O_RDWR
                                                               : (fields[5] & PROT_WRITE) != 0;
                           if ((fields[7] & kShared) != 0 && writes && out.size() < kMostNames)
                             out.insert(fields[4]);
                         }
                       });
  }
  return out;
}

}  // namespace

std::vector<NeededFile> needed_files(const UniqueFd& criu_dir) {
  Entries entries = read_entries(criu_dir, kMostOfImage);
  const auto written = written_where_mapped(criu_dir);
  std::vector<NeededFile> out;
  for (auto& [id, entry] : entries.regular) {
    if (!is_looked_up(entry) || entries.nameless.contains(id)) continue;
    if (written.contains(id)) entry.file.flags = (entry.file.flags & ~unsigned{O_ACCMODE}) | O_RDWR;
    out.push_back(std::move(entry.file));
  }
  return out;
}

Result<void> rename_link_remaps(const UniqueFd& criu_dir,
                                const std::map<std::string, std::string>& names) {
  if (names.empty()) return {};
  const std::string image = read_criu_image(criu_dir, kFilesImage);
  std::string out = image.substr(0, 8);
  const bool whole = each_message(image, kFilesMagic, [&](const protozero::pbf_reader& message) {
    append_message(out, renamed_entry(message, names));
  });
  if (!whole) return fail(ErrorCode::kImageCorrupt, "CRIU's files.img cannot be parsed");
  return replace_files_image(criu_dir, out);
}

Result<void> put_listeners_first(const UniqueFd& criu_dir) {
  const std::string image = read_criu_image(criu_dir, kFilesImage);
  std::string listeners;
  std::string others;
  std::set<std::uint64_t> seen;      // listeners
  std::set<std::uint64_t> awaiting;  // the other ends of connections, that had not been seen
  bool is_needed = false;
  const bool whole = each_message(image, kFilesMagic, [&](const protozero::pbf_reader& message) {
    const auto unix_socket = unix_socket_of(message);
    const bool listens = unix_socket && unix_socket->state == kListens;
    if (listens) {
      seen.insert(unix_socket->inode);
      is_needed |= awaiting.contains(unix_socket->inode);
    } else if (unix_socket && unix_socket->peer != 0 && !seen.contains(unix_socket->peer)) {
      awaiting.insert(unix_socket->peer);
    }
    const protozero::data_view bytes = message.data();
    append_message(listens ? listeners : others, {bytes.data(), bytes.size()});
  });
  if (!whole || !is_needed) return {};
  return replace_files_image(criu_dir, image.substr(0, 8) + listeners + others);
}

namespace {

// images/fdinfo.proto, and those of its entries, CRIU 4.2: where in an entry of files.img a
// fown_entry is; 0: such an entry has none.
std::uint32_t owner_field(std::uint32_t kind) {
  constexpr std::array<std::uint32_t, 23> kFields = {0, 0, 0, 5, 13, 0, 0, 11, 3, 3, 3, 0,
                                                     3, 4, 3, 5, 9,  0, 4, 4,  4, 4, 5};
  return kind < kFields.size() ? kFields[kind] : 0;
}

// fown_entry: without its number, if that is a thread's; else nothing.
std::optional<std::string> without_thread(protozero::data_view owner) {
  constexpr std::uint32_t kType = 4;
  constexpr std::uint32_t kNumber = 5;
  auto fields = numbers_of(protozero::pbf_reader(owner));
  if (fields[kType] != F_OWNER_TID || fields[kNumber] == 0) return std::nullopt;
  fields[kNumber] = 0;
  std::string out;
  protozero::pbf_writer writer(out);
  for (const auto& [tag, value] : fields)
    writer.add_uint64(tag, value);
  return out;
}

// Gives files.img other entries, where `change` of a kind and an entry is one.
template <typename Change>
Result<void> change_entries(const UniqueFd& criu_dir, const Change& change) {
  const std::string image = read_criu_image(criu_dir, kFilesImage);
  std::string out = image.substr(0, 8);
  bool is_needed = false;
  const bool whole = each_message(image, kFilesMagic, [&](const protozero::pbf_reader& message) {
    append_message(out, copy_message(message, [&](std::uint32_t kind, protozero::data_view entry) {
                     std::optional<std::string> other = change(kind, entry);
                     is_needed |= other.has_value();
                     return other;
                   }));
  });
  if (!whole || !is_needed) return {};
  return replace_files_image(criu_dir, out);
}

}  // namespace

Result<void> drop_owner_threads(const UniqueFd& criu_dir) {
  return change_entries(
      criu_dir, [](std::uint32_t kind, protozero::data_view entry) -> std::optional<std::string> {
        bool is_thread = false;
        const std::uint32_t owner = owner_field(kind);
        if (owner == 0) return std::nullopt;
        std::string other = copy_message(
            protozero::pbf_reader(entry), [&](std::uint32_t tag, protozero::data_view value) {
              auto without = tag == owner ? without_thread(value) : std::nullopt;
              is_thread |= without.has_value();
              return without;
            });
        return is_thread ? std::optional(std::move(other)) : std::nullopt;
      });
}

namespace {

// Where the flags of an entry are, and which of them CRIU can open its file with; no field: it is
// none of those.
struct OpenFlags {
  std::uint32_t field = 0;
  std::uint32_t fine = ~std::uint32_t{O_ASYNC};
};

// reg_file_entry, inotify_file_entry and tty_file_entry
OpenFlags open_flags(std::uint32_t kind, const protozero::data_view& entry) {
  constexpr std::uint32_t kRegularField = 3;
  constexpr std::uint32_t kInotifyField = 13;
  constexpr std::uint32_t kTerminalField = 19;
  constexpr std::uint32_t kMode = 10;
  if (kind == kTerminalField) return {3};
  if (kind == kInotifyField) return {2, O_NONBLOCK | O_CLOEXEC};
  if (kind != kRegularField) return {};
  auto fields = numbers_of(protozero::pbf_reader(entry));
  return S_ISFIFO(static_cast<mode_t>(fields[kMode])) ? OpenFlags{2} : OpenFlags{};
}

// Nothing if it can be opened so.
std::optional<std::string> without_signalling(std::uint32_t kind, protozero::data_view entry) {
  const auto [field, fine] = open_flags(kind, entry);
  if (field == 0 || (numbers_of(protozero::pbf_reader(entry))[field] & ~fine) == 0)
    return std::nullopt;
  std::string out;
  protozero::pbf_writer writer(out);
  protozero::pbf_reader message(entry);
  while (message.next()) {
    if (message.tag() == field && message.wire_type() == protozero::pbf_wire_type::varint)
      writer.add_uint32(field, message.get_uint32() & fine);
    else
      copy_field(message, writer);
  }
  return out;
}

}  // namespace

Result<void> drop_signalling(const UniqueFd& criu_dir) {
  return change_entries(criu_dir, without_signalling);
}

std::optional<std::string> what_is_wrong(const NeededFile& file) {
  struct stat info {};
  // The link itself was open (O_PATH and O_NOFOLLOW).
  const bool is_link = file.mode && S_ISLNK(*file.mode);
  if (::fstatat(AT_FDCWD, file.path.c_str(), &info, is_link ? AT_SYMLINK_NOFOLLOW : 0) != 0) {
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
