#include "criu/criu_sockets.h"

#include <dirent.h>
#include <net/if.h>

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
std::optional<BoundSocket> read_socket(protozero::pbf_reader message) {
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
  constexpr std::uint32_t kClosed = 7;   // TCP_CLOSE of net/tcp_states.h
  constexpr std::uint32_t kListen = 10;  // TCP_LISTEN
  BoundSocket out;
  std::uint32_t family = 0;
  std::uint32_t protocol = 0;
  std::uint32_t state = 0;
  std::uint32_t port = 0;
  std::vector<std::uint32_t> words;
  while (message.next()) {
    switch (message.tag()) {
      case kFamily:
        family = message.get_uint32();
        break;
      case kProtocol:
        protocol = message.get_uint32();
        break;
      case kState:
        state = message.get_uint32();
        break;
      case kPort:
        port = message.get_uint32();
        break;
      case kSource:
        words.push_back(message.get_uint32());
        break;
      case kOptions:
        read_options(message.get_message(), out);
        break;
      case kOnlySix:
        out.only_six = message.get_bool();
        break;
      case kInterface:
        out.interface = interface_name(message);
        break;
      default:
        message.skip();
    }
  }
  out.is_four = family == AF_INET;
  out.is_tcp = protocol == IPPROTO_TCP;
  if (!out.is_tcp && protocol != IPPROTO_UDP) return std::nullopt;
  if (out.is_tcp && state != kListen && state != kClosed) return std::nullopt;
  if (port == 0 || port > UINT16_MAX) return std::nullopt;
  out.port = static_cast<std::uint16_t>(port);
  // In the order in which they lie in memory.
  if (out.is_four && words.size() == 1) {
    out.address.s6_addr[10] = out.address.s6_addr[11] = 0xff;
    std::memcpy(&out.address.s6_addr[12], words.data(), sizeof(in_addr));
  } else if (family == AF_INET6 && words.size() == 4) {
    std::memcpy(&out.address, words.data(), sizeof out.address);
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

std::uint64_t socket_under_way(const UniqueFd& criu_dir, bool unix_sockets_too) {
  constexpr std::uint32_t kId = 2;  // of file_entry, images/fdinfo.proto
  constexpr std::uint32_t kInet = 4;
  constexpr std::uint32_t kUnix = 16;
  std::set<std::uint64_t> open;
  const DirectoryStream dir = list_open(fmt::format("/proc/self/fd/{}", criu_dir.get()));
  while (const dirent* entry = dir ? ::readdir(dir.get()) : nullptr) {
    const std::string name = entry->d_name;
    if (!name.starts_with("fdinfo-")) continue;
    (void)each_message(read_criu_image(criu_dir, name), kDescriptorsMagic,
                       [&](protozero::pbf_reader message) {
                         while (message.next(1))
                           open.insert(message.get_uint64());
                       });
  }
  std::uint64_t found = 0;
  (void)each_message(
      read_criu_image(criu_dir, kFilesImage), kFilesMagic, [&](protozero::pbf_reader message) {
        std::uint64_t id = 0;
        std::uint64_t number = 0;
        while (message.next()) {
          if (message.tag() == kId && message.wire_type() == protozero::pbf_wire_type::varint) {
            id = message.get_uint64();
          } else if (message.tag() == kInet || (message.tag() == kUnix && unix_sockets_too)) {
            protozero::pbf_reader socket = message.get_message();
            while (socket.next())
              if (socket.tag() == 2 && socket.wire_type() == protozero::pbf_wire_type::varint)
                number = socket.get_uint64();
              else
                socket.skip();
          } else {
            message.skip();
          }
        }
        if (number != 0 && !open.contains(id)) found = number;
      });
  return found;
}

}  // namespace stasis
