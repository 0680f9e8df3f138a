#include "tests/workloads/socket_options.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>

#include <array>
#include <cstring>
#include <optional>
#include <set>

namespace stasis::workloads {
namespace {

using PlaceInTree = std::pair<int, int>;  // level and number

struct Levels {
  int level;
  int last;
};
// SOL_SOCKET, IP, IPV6, TCP, UDP, SOL_RAW, SOL_NETLINK, SOL_PACKET.
constexpr std::array kLevels = {Levels{1, 90},   Levels{0, 60},  Levels{41, 85},  Levels{6, 50},
                                Levels{17, 110}, Levels{255, 8}, Levels{270, 16}, Levels{263, 24}};

// Reading it has an effect (SO_ERROR, TCP_SAVED_SYN, TCP_ZEROCOPY_RECEIVE), or it is a switch of an
// operation (TCP_REPAIR and its queue, UDP_CORK, which CRIU refuses), or it is SO_RCVBUFFORCE's.
const std::set<PlaceInTree> kLeftAlone = {{1, 4},  {6, 28}, {6, 35}, {6, 19}, {6, 20},
                                          {6, 21}, {6, 22}, {6, 29}, {17, 1}, {6, 31}};
std::optional<std::string> get(const UniqueFd& socket, PlaceInTree place) {
  std::array<char, 256> buffer{};
  socklen_t size = buffer.size();
  if (::getsockopt(socket.get(), place.first, place.second, buffer.data(), &size) != 0)
    return std::nullopt;
  return std::string(buffer.data(), size);
}

std::string bytes(const void* data, std::size_t size) {
  return {static_cast<const char*>(data), size};
}

// Values that may be another one than `now`.
std::vector<std::string> other_values(PlaceInTree place, const std::string& now) {
  std::vector<std::string> out;
  if (place == PlaceInTree{6, 13}) return {"reno", "cubic"};       // TCP_CONGESTION
  if (place == PlaceInTree{6, 33}) return {std::string(16, 'k')};  // TCP_FASTOPEN_KEY
  if (now.size() == sizeof(int)) {
    int value = 0;
    std::memcpy(&value, now.data(), sizeof value);
    for (const int other : {value == 0 ? 1 : 0, value + 1, 2, 3, 7, 100, 4000, 64000, -1})
      if (other != value) out.push_back(bytes(&other, sizeof other));
  } else if (place == PlaceInTree{1, 13}) {
    const linger other{1, 9};
    out.push_back(bytes(&other, sizeof other));
  } else if (now.size() == sizeof(std::uint64_t)) {
    for (const std::uint64_t other : {std::uint64_t{0x10}, std::uint64_t{123456}})
      out.push_back(bytes(&other, sizeof other));
  } else if (now.size() == sizeof(timeval)) {
    const timeval other{5, 0};
    out.push_back(bytes(&other, sizeof other));
  }
  return out;
}

sockaddr_storage address(const char* text) {
  sockaddr_storage out{};
  auto* four = reinterpret_cast<sockaddr_in*>(&out);
  auto* six = reinterpret_cast<sockaddr_in6*>(&out);
  out.ss_family = AF_INET;
  if (::inet_pton(AF_INET, text, &four->sin_addr) == 1) return out;
  out.ss_family = AF_INET6;
  ::inet_pton(AF_INET6, text, &six->sin6_addr);
  return out;
}

int level(const char* group) {
  return std::strchr(group, ':') == nullptr ? IPPROTO_IP : IPPROTO_IPV6;
}

std::string line(const std::string& what, bool kept) { return what + (kept ? ": kept" : ": lost"); }

}  // namespace

SocketOptions::SocketOptions() {
  add("udp4", AF_INET, SOCK_DGRAM);
  add("udp6", AF_INET6, SOCK_DGRAM);
  add("tcp4", AF_INET, SOCK_STREAM);
  add("tcp6", AF_INET6, SOCK_STREAM);
  add("raw4", AF_INET, SOCK_RAW, 253);
  add("raw6", AF_INET6, SOCK_RAW, 253);
  add("unix-datagram", AF_UNIX, SOCK_DGRAM);
  add("unix-stream", AF_UNIX, SOCK_STREAM);
  add("netlink", AF_NETLINK, SOCK_RAW);
  add("netlink-datagram", AF_NETLINK, SOCK_DGRAM);
  add("packet", AF_PACKET, SOCK_RAW);
  add_listener();
  for (std::size_t i = 0; i < sockets_.size(); ++i)
    change(i);
  // Some have more than one name, and so the last word.
  for (auto& [key, value] : set_)
    value = *get(sockets_[key.first].fd, key.second);
  join();
}

std::vector<std::string> SocketOptions::names() const {
  std::vector<std::string> out;
  for (const Socket& socket : sockets_)
    out.push_back(socket.name);
  return out;
}

std::vector<std::string> SocketOptions::options_of(std::size_t socket) const {
  std::vector<std::string> lines;
  for (const auto& [key, value] : set_) {
    if (key.first != socket) continue;
    const auto& [level, option] = key.second;
    lines.push_back(line(sockets_[socket].name + ": option " + std::to_string(option) +
                             " of level " + std::to_string(level),
                         get(sockets_[socket].fd, key.second) == value));
  }
  return lines;
}

std::vector<std::string> SocketOptions::groups() const {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < groups_.size(); ++i)
    lines.push_back(
        line(sockets_[groups_[i].socket].name + ": multicast group " + groups_[i].address,
             filter(groups_[i]) == filters_[i]));
  return lines;
}

void SocketOptions::add(const std::string& name, int domain, int type, int protocol) {
  UniqueFd fd(::socket(domain, type | SOCK_CLOEXEC, protocol));
  if (fd.valid()) sockets_.push_back({name, std::move(fd)});
}

void SocketOptions::add_listener() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&loopback), sizeof loopback) != 0 ||
      ::listen(fd.get(), 1) != 0)
    programs::die(1, "cannot listen");
  sockets_.push_back({"tcp-listener", std::move(fd)});
}

void SocketOptions::change(std::size_t index) {
  const UniqueFd& socket = sockets_[index].fd;
  for (const Levels& levels : kLevels) {
    for (int name = 0; name <= levels.last; ++name) {
      const PlaceInTree place{levels.level, name};
      if (kLeftAlone.contains(place)) continue;
      const auto now = get(socket, place);
      if (!now) continue;
      for (const std::string& other : other_values(place, *now)) {
        if (::setsockopt(socket.get(), place.first, place.second, other.data(),
                         static_cast<socklen_t>(other.size())) != 0)
          continue;
        const auto then = get(socket, place);
        if (!then || *then == *now) continue;
        set_[{index, place}] = *then;
        break;
      }
    }
  }
}

std::string SocketOptions::filter(const Group& group) const {
  constexpr std::uint32_t kRoom = 8;
  alignas(group_filter) std::array<char, GROUP_FILTER_SIZE(kRoom)> buffer{};
  auto* head = reinterpret_cast<group_filter*>(buffer.data());
  head->gf_interface = ::if_nametoindex("lo");
  head->gf_group = address(group.address);
  head->gf_numsrc = kRoom;
  socklen_t size = buffer.size();
  if (::getsockopt(sockets_[group.socket].fd.get(), level(group.address), MCAST_MSFILTER,
                   buffer.data(), &size) != 0)
    return {};
  return std::to_string(head->gf_fmode) + " " + std::to_string(head->gf_numsrc) +
         bytes(buffer.data() + offsetof(group_filter, gf_slist),
               head->gf_numsrc * sizeof(sockaddr_storage));
}

void SocketOptions::join() {
  const unsigned lo = ::if_nametoindex("lo");
  const auto all = [&](std::size_t socket, const char* group) {
    const group_req request{lo, address(group)};
    ::setsockopt(sockets_[socket].fd.get(), level(group), MCAST_JOIN_GROUP, &request,
                 sizeof request);
    groups_.push_back({socket, group});
  };
  const auto source = [&](int what, std::size_t socket, const char* group, const char* from) {
    const group_source_req request{lo, address(group), address(from)};
    ::setsockopt(sockets_[socket].fd.get(), level(group), what, &request, sizeof request);
  };
  all(0, "224.1.1.1");
  all(0, "224.1.1.2");
  source(MCAST_BLOCK_SOURCE, 0, "224.1.1.2", "127.0.0.9");
  source(MCAST_JOIN_SOURCE_GROUP, 0, "232.1.1.3", "127.0.0.1");
  source(MCAST_JOIN_SOURCE_GROUP, 0, "232.1.1.3", "127.0.0.2");
  groups_.push_back({0, "232.1.1.3"});
  all(1, "ff02::1234");
  all(1, "224.1.1.1");
  for (const Group& group : groups_) {
    filters_.push_back(filter(group));
    if (filters_.back().empty()) programs::die(1, std::string("cannot join ") + group.address);
  }
}

}  // namespace stasis::workloads
