#include "operations/tcp_ports.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"
#include "criu/criu_sockets.h"
#include "proc/tcp_ports.h"

namespace stasis {
namespace {

// TCP_TIMEWAIT_LEN of the kernel, and a little.
constexpr std::chrono::seconds kTimeWait{62};
constexpr std::chrono::milliseconds kPoll{200};

// Binds a socket there. True also where that cannot be tried.
bool is_here(const std::string& address) {
  sockaddr_in four{};
  sockaddr_in6 six{};
  const bool is_four = ::inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1;
  if (!is_four && ::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) != 1) return true;
  four.sin_family = AF_INET;
  six.sin6_family = AF_INET6;
  const UniqueFd socket(::socket(is_four ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return true;
  const auto* name =
      is_four ? reinterpret_cast<const sockaddr*>(&four) : reinterpret_cast<const sockaddr*>(&six);
  const auto size = static_cast<socklen_t>(is_four ? sizeof four : sizeof six);
  return ::bind(socket.get(), name, size) == 0 || errno != EADDRNOTAVAIL;
}

std::vector<std::string> texts_of(const std::vector<proc::BoundSocket>& sockets) {
  std::vector<std::string> out;
  for (const proc::BoundSocket& socket : sockets)
    out.push_back(socket.text());
  return out;
}

}  // namespace

Result<void> check_addresses(const Manifest& manifest, bool tcp_close,
                             const std::vector<AddressPair>& mapped) {
  if (!manifest.sockets) return {};
  std::set<std::string> needed(manifest.sockets->addresses.begin(),
                               manifest.sockets->addresses.end());
  if (!tcp_close)
    needed.insert(manifest.sockets->connection_addresses.begin(),
                  manifest.sockets->connection_addresses.end());
  std::vector<std::string> missing;
  for (const std::string& address : needed)
    if (!is_here(mapped_address(address, mapped)))
      missing.push_back(mapped_address(address, mapped));
  if (missing.empty()) return {};
  const bool only_connections =
      std::none_of(missing.begin(), missing.end(), [&](const std::string& address) {
        const auto& bound = manifest.sockets->addresses;
        return std::any_of(bound.begin(), bound.end(), [&](const std::string& one) {
          return mapped_address(one, mapped) == address;
        });
      });
  const bool is_six = missing.front().find(':') != std::string::npos;
  return fail(
      ErrorCode::kCriuFailed,
      fmt::format("{} of the job {} {}, which is not an address of this machine",
                  only_connections ? "TCP connections" : "sockets",
                  only_connections ? "have the address" : "are bound to", fmt::join(missing, ", ")),
      fmt::format("give this machine the address (ip address add {}/{} dev lo), or the job "
                  "another one: --map-address {}=NEW{}",
                  missing.front(), is_six ? 128 : 32, missing.front(),
                  only_connections ? ", or let the connections be closed: --tcp-close"
                                   : "; a program that listens on all addresses does not need it"));
}

namespace {

// An image with a network of its own brings its ports along.
bool has_own_network(const Manifest& manifest) {
  return std::any_of(manifest.files.begin(), manifest.files.end(),
                     [](const FileRecord& file) { return file.path.starts_with("criu/netdev-"); });
}

// Of the image's sockets, those that another one is in the way of.
std::vector<proc::BoundSocket> taken_ports(const ImageReader& image,
                                           const std::vector<AddressPair>& mapped) {
  if (has_own_network(image.manifest())) return {};
  std::vector<proc::BoundSocket> sockets = bound_sockets(image.criu_dir());
  for (proc::BoundSocket& socket : sockets) {
    const auto pair = std::find_if(mapped.begin(), mapped.end(), [&](const AddressPair& one) {
      return std::memcmp(&one.from_bytes, &socket.address, sizeof socket.address) == 0;
    });
    if (pair != mapped.end()) socket.address = pair->to_bytes;
  }
  std::erase_if(sockets, [](const proc::BoundSocket& one) { return !proc::is_taken(one); });
  return sockets;
}

}  // namespace

Result<void> wait_for_ports(const Environment& env, const ImageReader& image,
                            const std::vector<AddressPair>& mapped) {
  const auto taken = taken_ports(image, mapped);
  if (taken.empty() || proc::count_time_waits(taken, true) == 0) return {};
  env.tell(
      "waiting for TCP ports of the job: their last connections were closed less than a minute "
      "ago");
  const auto start = Clock::now();
  while (proc::count_time_waits(taken, true) != 0) {
    STASIS_TRY(env.interrupt.check());
    if (since(start) > kTimeWait) {
      // CRIU may know better, and says so if it does not.
      env.tell(fmt::format("closed connections still hold a port of the job, one of {}",
                           fmt::join(texts_of(taken), ", ")));
      return {};
    }
    std::this_thread::sleep_for(kPoll);
  }
  return {};
}

Result<void> check_ports(const ImageReader& image, const std::vector<AddressPair>& mapped) {
  auto taken = taken_ports(image, mapped);
  std::erase_if(taken, [](const proc::BoundSocket& one) {
    return proc::count_time_waits({one}, false) != 0 && !proc::is_listened_at(one);
  });
  if (taken.empty()) return {};
  const proc::BoundSocket& first = taken.front();
  const char* protocol = first.is_tcp ? "TCP" : "UDP";
  return fail(
      ErrorCode::kBusy,
      fmt::format(
          "a socket of the image has the {} port {}, which is in use here{}", protocol,
          first.text(),
          taken.size() == 1 ? "" : fmt::format(", as are {} more of its ports", taken.size() - 1)),
      fmt::format("end what has it (ss -anp{} 'sport = :{}')", first.is_tcp ? 't' : 'u',
                  first.port));
}

}  // namespace stasis
