#include "criu/criu_addresses.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <protozero/pbf_writer.hpp>

#include "criu/criu_messages.h"
#include "image/directory.h"

namespace stasis {
namespace {

constexpr const char* kFolder = "images";

std::optional<in6_addr> parse_address(const std::string& text) {
  in6_addr out{};
  if (::inet_pton(AF_INET6, text.c_str(), &out) == 1) return out;
  in_addr four{};
  if (::inet_pton(AF_INET, text.c_str(), &four) != 1) return std::nullopt;
  out.s6_addr[10] = out.s6_addr[11] = 0xff;
  std::memcpy(&out.s6_addr[12], &four, sizeof four);
  return out;
}

bool is_four(const in6_addr& address) { return IN6_IS_ADDR_V4MAPPED(&address) != 0; }

// As an entry has it: one word, or four, in the order in which they lie in memory.
std::optional<in6_addr> address_of(const std::vector<std::uint32_t>& words) {
  in6_addr out{};
  if (words.size() == 4) {
    std::memcpy(&out, words.data(), sizeof out);
    return out;
  }
  if (words.size() != 1) return std::nullopt;
  out.s6_addr[10] = out.s6_addr[11] = 0xff;
  std::memcpy(&out.s6_addr[12], words.data(), sizeof(std::uint32_t));
  return out;
}

class Mapper {
 public:
  explicit Mapper(const std::vector<AddressPair>& pairs)
      : pairs_(pairs), used_(pairs.size(), false) {}

  // An entry of files.img (file_entry of images/fdinfo.proto, CRIU 4.2).
  std::string entry(protozero::pbf_reader message) {
    constexpr std::uint32_t kInet = 4;
    std::string out;
    protozero::pbf_writer writer(out);
    while (message.next()) {
      if (message.tag() == kInet &&
          message.wire_type() == protozero::pbf_wire_type::length_delimited)
        writer.add_message(kInet, socket(message.get_message()));
      else
        copy_field(message, writer);
    }
    return out;
  }

  std::optional<std::size_t> unused() const {
    const auto at = std::find(used_.begin(), used_.end(), false);
    if (at == used_.end()) return std::nullopt;
    return static_cast<std::size_t>(at - used_.begin());
  }

 private:
  // inet_sk_entry of images/sk-inet.proto.
  std::string socket(protozero::pbf_reader message) {
    constexpr std::uint32_t kSource = 11;
    constexpr std::uint32_t kDestination = 12;
    std::string out;
    protozero::pbf_writer writer(out);
    std::vector<std::uint32_t> source;
    std::vector<std::uint32_t> destination;
    while (message.next()) {
      const bool is_word = message.wire_type() == protozero::pbf_wire_type::varint;
      if (is_word && message.tag() == kSource)
        source.push_back(message.get_uint32());
      else if (is_word && message.tag() == kDestination)
        destination.push_back(message.get_uint32());
      else
        copy_field(message, writer);
    }
    map(source);
    map(destination);
    for (const auto word : source)
      writer.add_uint32(kSource, word);
    for (const auto word : destination)
      writer.add_uint32(kDestination, word);
    return out;
  }

  void map(std::vector<std::uint32_t>& words) {
    const auto address = address_of(words);
    if (!address) return;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      if (std::memcmp(&pairs_[i].from_bytes, &*address, sizeof *address) != 0) continue;
      used_[i] = true;
      const auto* bytes = pairs_[i].to_bytes.s6_addr;
      const std::size_t size = words.size() * sizeof(std::uint32_t);
      std::memcpy(words.data(), bytes + sizeof(in6_addr) - size, size);
      return;
    }
  }

  const std::vector<AddressPair>& pairs_;
  std::vector<bool> used_;
};

Result<void> write_files_image(const UniqueFd& folder, const std::string& image) {
  STASIS_TRY_ASSIGN(auto file, open_file(folder.get(), kFilesImage,
                                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  STASIS_TRY(write_all(file.get(), image.data(), image.size(), kFilesImage));
  return file.close(kFilesImage);
}

}  // namespace

Result<AddressPair> parse_address_pair(const std::string& text) {
  const auto refuse = [&](const std::string& why) {
    return fail(ErrorCode::kUsage, fmt::format("'{}' {}", text, why),
                "write OLD=NEW, e.g. --map-address 10.0.0.5=10.0.0.9");
  };
  const auto equals = text.find('=');
  if (equals == std::string::npos) return refuse("is no pair of addresses");
  AddressPair out{text.substr(0, equals), text.substr(equals + 1)};
  const auto from = parse_address(out.from);
  const auto to = parse_address(out.to);
  if (!from || !to) return refuse("has something that is no address of IPv4 or IPv6");
  if (is_four(*from) != is_four(*to)) return refuse("has one address of IPv4 and one of IPv6");
  out.from_bytes = *from;
  out.to_bytes = *to;
  return out;
}

std::string mapped_address(const std::string& address, const std::vector<AddressPair>& pairs) {
  const auto bytes = parse_address(address);
  if (!bytes) return address;
  for (const AddressPair& pair : pairs)
    if (std::memcmp(&pair.from_bytes, &*bytes, sizeof *bytes) == 0) return pair.to;
  return address;
}

Result<std::string> files_with_addresses(const std::string& image,
                                         const std::vector<AddressPair>& pairs) {
  std::string out = image.substr(0, 8);
  Mapper mapper(pairs);
  const bool whole = each_message(image, kFilesMagic, [&](const protozero::pbf_reader& message) {
    append_message(out, mapper.entry(message));
  });
  if (!whole) return fail(ErrorCode::kImageCorrupt, "CRIU's files.img cannot be parsed");
  if (const auto unused = mapper.unused()) {
    return fail(ErrorCode::kUsage,
                fmt::format("no socket of the image has the address {}", pairs[*unused].from),
                "`stasis inspect` names the addresses that its sockets have");
  }
  return out;
}

Result<UniqueFd> map_addresses(const UniqueFd& criu_dir, const UniqueFd& work_dir,
                               const std::vector<AddressPair>& pairs) {
  STASIS_TRY_ASSIGN(const auto files,
                    files_with_addresses(read_criu_image(criu_dir, kFilesImage), pairs));
  STASIS_TRY_ASSIGN(const auto names, list_directory(criu_dir, "CRIU's files"));
  if (::mkdirat(work_dir.get(), kFolder, 0700) != 0)
    return fail(errno_error("cannot create a folder for criu", errno));
  STASIS_TRY_ASSIGN(auto folder,
                    open_file(work_dir.get(), kFolder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  for (const std::string& name : names) {
    if (name.starts_with("mountpoints-")) {
      return fail(ErrorCode::kNotSupported,
                  "the image has mounts of its own, and other addresses cannot be given to it",
                  "restore it where its addresses are");
    }
    if (name == kFilesImage) continue;
    const std::string link = fmt::format("/proc/{}/fd/{}/{}", ::getpid(), criu_dir.get(), name);
    if (::symlinkat(link.c_str(), folder.get(), name.c_str()) != 0)
      return fail(errno_error("cannot create a link for criu", errno));
  }
  STASIS_TRY(write_files_image(folder, files));
  return folder;
}

}  // namespace stasis
