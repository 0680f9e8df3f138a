#include "criu/criu_addresses.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <compare>
#include <cstring>
#include <map>
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

std::string address_text(const in6_addr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const bool four = is_four(address);
  (void)::inet_ntop(four ? AF_INET : AF_INET6,
                    four ? static_cast<const void*>(&address.s6_addr[12]) : &address, text.data(),
                    text.size());
  return text.data();
}

// What no socket can be given: not one machine's, or of a link, which wants its interface besides.
bool is_no_machines(const in6_addr& address) {
  in_addr four{};
  std::memcpy(&four, &address.s6_addr[12], sizeof four);
  const auto number = ntohl(four.s_addr);
  if (is_four(address)) return number == INADDR_ANY || number >= INADDR_UNSPEC_GROUP;
  return IN6_IS_ADDR_UNSPECIFIED(&address) || IN6_IS_ADDR_MULTICAST(&address) ||
         IN6_IS_ADDR_LINKLOCAL(&address);
}

// What two sockets may not have in common that had not before.
struct SocketPlace {
  std::uint32_t protocol = 0;
  std::uint32_t port = 0;
  std::uint32_t peers_port = 0;
  std::string source;
  std::string destination;
  auto operator<=>(const SocketPlace&) const = default;
};

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
  // Of two sockets that would lie in one place, where one of them was.
  const std::optional<std::pair<SocketPlace, SocketPlace>>& clash() const { return clash_; }

 private:
  // inet_sk_entry of images/sk-inet.proto.
  std::string socket(protozero::pbf_reader message) {
    constexpr std::uint32_t kSource = 11;
    constexpr std::uint32_t kDestination = 12;
    std::string out;
    protozero::pbf_writer writer(out);
    std::vector<std::uint32_t> source;
    std::vector<std::uint32_t> destination;
    SocketPlace place;
    while (message.next()) {
      const bool is_word = message.wire_type() == protozero::pbf_wire_type::varint;
      if (is_word && message.tag() == kSource)
        source.push_back(message.get_uint32());
      else if (is_word && message.tag() == kDestination)
        destination.push_back(message.get_uint32());
      else if (is_word)
        copy_number(message, writer, place);
      else
        copy_field(message, writer);
    }
    const SocketPlace before = with_addresses(place, source, destination);
    map(source);
    map(destination);
    note(before, with_addresses(place, source, destination));
    for (const auto word : source)
      writer.add_uint32(kSource, word);
    for (const auto word : destination)
      writer.add_uint32(kDestination, word);
    return out;
  }

  static void copy_number(protozero::pbf_reader& message, protozero::pbf_writer& writer,
                          SocketPlace& place) {
    constexpr std::uint32_t kProtocol = 5;
    constexpr std::uint32_t kPort = 7;
    constexpr std::uint32_t kPeersPort = 8;
    const auto tag = message.tag();
    const std::uint64_t value = message.get_uint64();
    writer.add_uint64(tag, value);
    const auto number = static_cast<std::uint32_t>(value);
    if (tag == kProtocol) place.protocol = number;
    if (tag == kPort) place.port = number;
    if (tag == kPeersPort) place.peers_port = number;
  }

  static SocketPlace with_addresses(SocketPlace place, const std::vector<std::uint32_t>& source,
                                    const std::vector<std::uint32_t>& destination) {
    if (const auto address = address_of(source)) place.source = address_text(*address);
    if (const auto address = address_of(destination)) place.destination = address_text(*address);
    return place;
  }

  // The kernel lets both have it, and one of them is reached no more.
  void note(const SocketPlace& before, const SocketPlace& after) {
    if (before.port == 0) return;
    const auto [at, is_new] = places_.emplace(after, before);
    if (!is_new && at->second != before && !clash_) clash_.emplace(at->second, before);
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
  std::map<SocketPlace, SocketPlace>
      places_;  // by where sockets come to lie, where the first one was
  std::optional<std::pair<SocketPlace, SocketPlace>> clash_;
};

Result<void> check_pairs(const std::vector<AddressPair>& pairs) {
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    for (std::size_t other = 0; other < i; ++other) {
      if (std::memcmp(&pairs[i].from_bytes, &pairs[other].from_bytes, sizeof(in6_addr)) != 0)
        continue;
      return fail(ErrorCode::kUsage,
                  fmt::format("the address {} is mapped to two others, {} and {}", pairs[i].from,
                              pairs[other].to, pairs[i].to),
                  "give each address once");
    }
  }
  return {};
}

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
  if (is_no_machines(*to))
    return refuse("has as the second no address of one machine (all, several, or of a link)");
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
  STASIS_TRY(check_pairs(pairs));
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
  if (const auto& clash = mapper.clash()) {
    return fail(ErrorCode::kUsage,
                fmt::format("two sockets of the image would have one address and port: that of {} "
                            "port {} and that of {} port {}",
                            clash->first.source, clash->first.port, clash->second.source,
                            clash->second.port),
                "give each of these addresses another one");
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
      return fail(
          refusal({"own-mounts",
                   Severity::kRed,
                   {},
                   "the image has mounts of its own, and other addresses cannot be given to it",
                   "restore it where its addresses are"}));
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
