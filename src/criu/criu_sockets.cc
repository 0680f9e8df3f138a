#include "criu/criu_sockets.h"

#include <dirent.h>
#include <fcntl.h>
#include <net/if.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include <fmt/format.h>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

using proc::BoundSocket;

// The name of a network interface, as the kernel would have it.
std::string interface_name(protozero::pbf_reader& message) {
  std::string name = message.get_string();
  const bool fits = name.size() < IFNAMSIZ && name.find('\0') == std::string::npos;
  return fits ? name : std::string();
}

// sk_opts_entry of images/sk-opts.proto, CRIU 4.2.
void read_options(protozero::pbf_reader message, BoundSocket& out) {
  constexpr std::uint32_t kBoundDevice = 15;
  while (message.next()) {
    if (message.tag() == kBoundDevice)
      out.device = interface_name(message);
    else
      message.skip();
  }
}

// inet_sk_entry of images/sk-inet.proto.
struct InetEntry {
  std::uint32_t family = 0;
  std::uint32_t protocol = 0;
  std::uint32_t state = 0;
  std::uint32_t port = 0;
  std::vector<std::uint32_t> address;  // words, in the order in which they lie in memory
  BoundSocket socket;                  // the rest
};

InetEntry read_entry(protozero::pbf_reader message) {
  enum : std::uint32_t {
    kFamily = 3,
    kProtocol = 5,
    kState = 6,
    kPort = 7,
    kSource = 11,
    kOptions = 14,
    kOnlySix = 15,
    kInterface = 17
  };
  InetEntry out;
  while (message.next()) {
    switch (message.tag()) {
      case kFamily:
        out.family = message.get_uint32();
        break;
      case kProtocol:
        out.protocol = message.get_uint32();
        break;
      case kState:
        out.state = message.get_uint32();
        break;
      case kPort:
        out.port = message.get_uint32();
        break;
      case kSource:
        out.address.push_back(message.get_uint32());
        break;
      case kOptions:
        read_options(message.get_message(), out.socket);
        break;
      case kOnlySix:
        out.socket.only_six = message.get_bool();
        break;
      case kInterface:
        out.socket.interface = interface_name(message);
        break;
      default:
        message.skip();
    }
  }
  return out;
}

// Nothing of one that is not bound to a port, or is a connection.
std::optional<BoundSocket> read_socket(protozero::pbf_reader message) {
  constexpr std::uint32_t kClosed = 7;   // TCP_CLOSE of net/tcp_states.h
  constexpr std::uint32_t kListen = 10;  // TCP_LISTEN
  const InetEntry entry = read_entry(message);
  BoundSocket out = entry.socket;
  out.is_four = entry.family == AF_INET;
  out.is_tcp = entry.protocol == IPPROTO_TCP;
  if (!out.is_tcp && entry.protocol != IPPROTO_UDP) return std::nullopt;
  if (out.is_tcp && entry.state != kListen && entry.state != kClosed) return std::nullopt;
  if (entry.port == 0 || entry.port > UINT16_MAX) return std::nullopt;
  out.port = static_cast<std::uint16_t>(entry.port);
  if (out.is_four && entry.address.size() == 1) {
    out.address.s6_addr[10] = out.address.s6_addr[11] = 0xff;
    std::memcpy(&out.address.s6_addr[12], entry.address.data(), sizeof(in_addr));
  } else if (entry.family == AF_INET6 && entry.address.size() == 4) {
    std::memcpy(&out.address, entry.address.data(), sizeof out.address);
  } else {
    return std::nullopt;
  }
  return out;
}

}  // namespace

std::vector<BoundSocket> bound_sockets(const UniqueFd& criu_dir) {
  constexpr std::uint32_t kInet = 4;  // of file_entry, images/fdinfo.proto
  std::vector<BoundSocket> out;
  std::set<std::tuple<std::string, bool, bool, std::string, std::string>> seen;
  const std::string image = read_criu_image(criu_dir, kFilesImage);
  (void)each_message(image, kFilesMagic, [&](protozero::pbf_reader message) {
    while (message.next(kInet)) {
      auto socket = read_socket(message.get_message());
      if (!socket) continue;
      if (seen.emplace(socket->text(), socket->is_tcp, socket->only_six, socket->device,
                       socket->interface)
              .second)
        out.push_back(std::move(*socket));
    }
  });
  return out;
}

namespace {

// Of all processes' tables.
std::set<std::uint64_t> open_files(const UniqueFd& criu_dir) {
  std::set<std::uint64_t> out;
  const DirectoryStream dir = list_open(fmt::format("/proc/self/fd/{}", criu_dir.get()));
  while (const dirent* entry = dir ? ::readdir(dir.get()) : nullptr) {
    const std::string name = entry->d_name;
    if (!name.starts_with("fdinfo-")) continue;
    (void)each_message(read_criu_image(criu_dir, name), kDescriptorsMagic,
                       [&](protozero::pbf_reader message) {
                         while (message.next(1))
                           out.insert(message.get_uint64());
                       });
  }
  return out;
}

// The last number with that tag.
std::uint64_t number_in(protozero::pbf_reader message, std::uint32_t tag) {
  std::uint64_t out = 0;
  while (message.next())
    if (message.tag() == tag && message.wire_type() == protozero::pbf_wire_type::varint)
      out = message.get_uint64();
    else
      message.skip();
  return out;
}

}  // namespace

std::string descriptor_under_way(const UniqueFd& criu_dir, bool unix_sockets_too) {
  // file_entry, images/fdinfo.proto; the number of a socket in inet_sk_entry and unix_sk_entry, and
  // the flags in memfd_file_entry.
  constexpr std::uint32_t kId = 2;
  constexpr std::uint32_t kInet = 4;
  constexpr std::uint32_t kTimer = 12;
  constexpr std::uint32_t kInotify = 13;
  constexpr std::uint32_t kFanotify = 14;
  constexpr std::uint32_t kUnix = 16;
  constexpr std::uint32_t kMemory = 20;
  constexpr std::uint32_t kNumber = 2;
  constexpr std::uint32_t kFlags = 2;
  const std::set<std::uint64_t> open = open_files(criu_dir);
  std::string found;
  (void)each_message(read_criu_image(criu_dir, kFilesImage), kFilesMagic,
                     [&](protozero::pbf_reader message) {
                       std::uint64_t id = 0;
                       std::string what;
                       while (message.next()) {
                         const auto tag = message.tag();
                         if (message.wire_type() != protozero::pbf_wire_type::length_delimited) {
                           if (tag == kId)
                             id = message.get_uint64();
                           else
                             message.skip();
                           continue;
                         }
                         const protozero::pbf_reader entry = message.get_message();
                         if (tag == kInet || (tag == kUnix && unix_sockets_too))
                           what = fmt::format("socket {}", number_in(entry, kNumber));
                         else if (tag == kTimer)
                           what = "a timerfd";
                         else if (tag == kInotify || tag == kFanotify)
                           what = "a descriptor of inotify or fanotify";
                         else if (tag == kMemory && (number_in(entry, kFlags) & O_PATH) != 0)
                           what = "memory that is open by O_PATH";
                       }
                       if (!what.empty() && !open.contains(id)) found = what;
                     });
  return found;
}

std::map<std::uint64_t, std::uint64_t> saved_in_unix_sockets(const UniqueFd& criu_dir) {
  // sk_packet_entry, images/sk-packet.proto, each with its bytes behind it.
  constexpr std::uint32_t kQueuesMagic = 0x56264026;
  constexpr std::uint32_t kIdFor = 1;
  constexpr std::uint32_t kLength = 2;
  const std::string image = read_criu_image(criu_dir, "sk-queues.img");
  std::map<std::uint64_t, std::uint64_t> by_id;
  std::uint32_t word = 0;
  std::size_t at = 2 * sizeof word;
  const bool has_any = image.size() >= at;  // CRIU makes it with the first
  // Or it is larger than what is read.
  if (!has_any && ::faccessat(criu_dir.get(), "sk-queues.img", F_OK, 0) == 0) return {};
  if (has_any && std::memcmp(image.data() + sizeof word, &kQueuesMagic, sizeof word) != 0)
    return {};
  while (has_any && image.size() - at >= sizeof word) {
    std::memcpy(&word, image.data() + at, sizeof word);
    at += sizeof word;
    if (word > image.size() - at) return {};
    try {
      const protozero::pbf_reader packet(image.data() + at, word);
      const std::uint64_t length = number_in(packet, kLength);
      by_id[number_in(packet, kIdFor)] += length;
      at += word;
      if (length > image.size() - at) return {};
      at += length;
    } catch (const protozero::exception&) {
      return {};
    }
  }
  constexpr std::uint32_t kUnix = 16;  // of file_entry
  constexpr std::uint32_t kId = 1;     // of unix_sk_entry
  constexpr std::uint32_t kInode = 2;
  std::map<std::uint64_t, std::uint64_t> out;
  (void)each_message(read_criu_image(criu_dir, kFilesImage), kFilesMagic,
                     [&](protozero::pbf_reader message) {
                       while (message.next()) {
                         if (message.tag() != kUnix ||
                             message.wire_type() != protozero::pbf_wire_type::length_delimited) {
                           message.skip();
                           continue;
                         }
                         const protozero::pbf_reader entry = message.get_message();
                         const auto found = by_id.find(number_in(entry, kId));
                         out[number_in(entry, kInode)] = found == by_id.end() ? 0 : found->second;
                       }
                     });
  return out;
}

}  // namespace stasis
