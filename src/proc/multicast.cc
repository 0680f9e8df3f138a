#include "proc/multicast.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string_view>

#include <fmt/format.h>

namespace stasis::proc {
namespace {

constexpr std::size_t kLongestList = 4U << 20;  // bytes

std::optional<sockaddr_storage> address_of(const std::string& text) {
  sockaddr_storage out{};
  auto* four = reinterpret_cast<sockaddr_in*>(&out);
  auto* six = reinterpret_cast<sockaddr_in6*>(&out);
  if (::inet_pton(AF_INET, text.c_str(), &four->sin_addr) == 1) {
    out.ss_family = AF_INET;
    return out;
  }
  if (::inet_pton(AF_INET6, text.c_str(), &six->sin6_addr) != 1) return std::nullopt;
  out.ss_family = AF_INET6;
  return out;
}

std::string text_of(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* from =
      address.ss_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(&address)->sin_addr)
          : &reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr;
  if (::inet_ntop(address.ss_family, from, text.data(), text.size()) == nullptr) return {};
  return text.data();
}

// Of the level at which a socket of that kind joins the group; nothing if it cannot.
std::optional<int> level_of(const SocketKind& kind, const sockaddr_storage& group) {
  if (group.ss_family == AF_INET) {
    if (kind.domain == AF_INET6 && kind.type == SOCK_RAW) return std::nullopt;
    return IPPROTO_IP;
  }
  return kind.domain == AF_INET6 ? std::optional<int>(IPPROTO_IPV6) : std::nullopt;
}

// Room for as many sources as are looked at.
struct Filter {
  group_filter head{};
  std::array<sockaddr_storage, kMaxSources - 1> rest{};
};

// From "010000E0", the address's four bytes as one number of this machine.
std::string address_of_igmp(std::string_view hexadecimal) {
  std::uint32_t number = 0;
  std::from_chars(hexadecimal.data(), hexadecimal.data() + hexadecimal.size(), number, 16);
  sockaddr_storage address{};
  address.ss_family = AF_INET;
  reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr = number;
  return text_of(address);
}

std::string address_of_igmp6(std::string_view hexadecimal) {
  sockaddr_storage address{};
  address.ss_family = AF_INET6;
  auto& bytes = reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr.s6_addr;
  if (hexadecimal.size() != 2 * sizeof bytes) return {};
  for (std::size_t i = 0; i < sizeof bytes; ++i)
    std::from_chars(hexadecimal.data() + 2 * i, hexadecimal.data() + 2 * i + 2, bytes[i], 16);
  return text_of(address);
}

}  // namespace

std::vector<MulticastGroup> multicast_groups(Pid pid, std::size_t most) {
  std::vector<MulticastGroup> out;
  const auto add = [&](MulticastGroup group) {
    if (out.size() < most && !group.address.empty()) out.push_back(std::move(group));
  };
  // "1 lo : 1 V3" and below it "0000E001 1 0:00000000 0" for each group.
  const auto four = read_file(AT_FDCWD, fmt::format("/proc/{}/net/igmp", pid.value), kLongestList);
  if (four) {
    std::istringstream lines(*four);
    MulticastGroup interface;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string first;
      if (!line.empty() && line.front() >= '0' && line.front() <= '9') {
        interface = {};
        words >> interface.index >> interface.interface;
        if (interface.interface.ends_with(':')) interface.interface.pop_back();
      } else if (words >> first && line.front() == '\t') {
        interface.address = address_of_igmp(first);
        add(interface);
      }
    }
  }
  // "1 lo ff020000000000000000000000000001 1 0000000C 0".
  const auto six = read_file(AT_FDCWD, fmt::format("/proc/{}/net/igmp6", pid.value), kLongestList);
  if (six) {
    std::istringstream lines(*six);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      MulticastGroup group;
      std::string address;
      if (!(words >> group.index >> group.interface >> address)) continue;
      group.address = address_of_igmp6(address);
      add(group);
    }
  }
  return out;
}

bool joins_groups(const SocketKind& kind) {
  return (kind.domain == AF_INET || kind.domain == AF_INET6) &&
         (kind.type == SOCK_DGRAM || kind.type == SOCK_RAW);
}

std::optional<Membership> membership(const UniqueFd& socket, const SocketKind& kind,
                                     const MulticastGroup& group) {
  const auto address = address_of(group.address);
  const auto level = address ? level_of(kind, *address) : std::nullopt;
  if (!level) return std::nullopt;
  Filter filter;
  filter.head.gf_interface = group.index;
  filter.head.gf_group = *address;
  filter.head.gf_numsrc = kMaxSources;
  socklen_t size = sizeof filter;
  if (::getsockopt(socket.get(), *level, MCAST_MSFILTER, &filter, &size) != 0) return std::nullopt;
  if (filter.head.gf_numsrc > kMaxSources) return std::nullopt;
  Membership out{group.interface, group.address, filter.head.gf_fmode == MCAST_INCLUDE, {}};
  const auto* bytes = reinterpret_cast<const char*>(&filter) + offsetof(group_filter, gf_slist);
  for (std::size_t i = 0; i < filter.head.gf_numsrc; ++i) {
    sockaddr_storage source{};
    std::memcpy(&source, bytes + i * sizeof source, sizeof source);
    source.ss_family = address->ss_family;
    out.sources.push_back(text_of(source));
  }
  return out;
}

int join(const UniqueFd& socket, const SocketKind& kind, const Membership& wanted) {
  const auto address = address_of(wanted.group);
  const auto level = address ? level_of(kind, *address) : std::nullopt;
  if (!level || wanted.sources.size() > kMaxSources) return EINVAL;
  const unsigned index = interface_index(socket, wanted.interface);
  if (index == 0) return ENODEV;
  const auto now = membership(socket, kind, {wanted.interface, index, wanted.group});
  if (now == wanted) return 0;
  std::vector<sockaddr_storage> sources;
  for (const std::string& text : wanted.sources) {
    const auto source = address_of(text);
    if (!source || source->ss_family != address->ss_family) return EINVAL;
    sources.push_back(*source);
  }
  const group_req group{index, *address};
  const int done =
      now ? 0 : ::setsockopt(socket.get(), *level, MCAST_JOIN_GROUP, &group, sizeof group);
  if (done != 0) return errno;
  if (!wanted.include && sources.empty() && !now) return 0;
  // An empty list of sources to be heard alone is what leaving a group comes to.
  Filter filter;
  filter.head.gf_interface = index;
  filter.head.gf_group = *address;
  filter.head.gf_fmode = wanted.include ? MCAST_INCLUDE : MCAST_EXCLUDE;
  filter.head.gf_numsrc = static_cast<std::uint32_t>(sources.size());
  auto* bytes = reinterpret_cast<char*>(&filter) + offsetof(group_filter, gf_slist);
  std::memcpy(bytes, sources.data(), sources.size() * sizeof(sockaddr_storage));
  const auto size = static_cast<socklen_t>(GROUP_FILTER_SIZE(sources.size()));
  return ::setsockopt(socket.get(), *level, MCAST_MSFILTER, &filter, size) == 0 ? 0 : errno;
}

}  // namespace stasis::proc
