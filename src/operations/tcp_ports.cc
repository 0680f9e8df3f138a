#include "operations/tcp_ports.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"

namespace stasis {
namespace {

// TCP_TIMEWAIT_LEN of the kernel, and a little.
constexpr std::chrono::seconds kTimeWait{62};
constexpr std::chrono::milliseconds kPoll{200};

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

Request request(std::uint8_t family, std::uint16_t type, int flags) {
  Request out{};
  out.header.nlmsg_len = sizeof out;
  out.header.nlmsg_type = type;
  out.header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
  out.body.sdiag_family = family;
  out.body.sdiag_protocol = IPPROTO_TCP;
  out.body.idiag_states = 1U << TCP_TIME_WAIT;
  return out;
}

bool ask(const UniqueFd& netlink, const Request& what) {
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  return ::sendto(netlink.get(), &what, sizeof what, 0, reinterpret_cast<const sockaddr*>(&kernel),
                  sizeof kernel) == sizeof what;
}

// The connections of a family in TIME_WAIT.
std::vector<inet_diag_sockid> time_waits(const UniqueFd& netlink, std::uint8_t family) {
  std::vector<inet_diag_sockid> out;
  if (!ask(netlink, request(family, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP))) return out;
  alignas(nlmsghdr) std::array<char, 32768> buffer;
  for (;;) {
    const ssize_t got = ::recv(netlink.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0) return out;
    auto left = static_cast<unsigned>(got);
    for (auto* message = reinterpret_cast<nlmsghdr*>(buffer.data()); NLMSG_OK(message, left);
         message = NLMSG_NEXT(message, left)) {
      if (message->nlmsg_type == NLMSG_DONE || message->nlmsg_type == NLMSG_ERROR) return out;
      inet_diag_msg info{};
      if (message->nlmsg_len < NLMSG_LENGTH(sizeof info)) continue;
      std::memcpy(&info, NLMSG_DATA(message), sizeof info);
      out.push_back(info.id);
    }
  }
}

}  // namespace

int count_time_waits(const std::set<std::uint16_t>& ports, bool end) {
  const UniqueFd netlink(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!netlink.valid()) return 0;
  const timeval patience{1, 0};  // the kernel answers at once, or not at all
  ::setsockopt(netlink.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  int count = 0;
  for (const std::uint8_t family : {std::uint8_t{AF_INET}, std::uint8_t{AF_INET6}}) {
    for (const inet_diag_sockid& id : time_waits(netlink, family)) {
      if (!ports.contains(ntohs(id.idiag_sport))) continue;
      Request kill = request(family, SOCK_DESTROY, NLM_F_ACK);
      kill.body.id = id;
      struct {
        nlmsghdr header;
        nlmsgerr body;
      } answer{};
      const bool ended = end && ask(netlink, kill) &&
                         ::recv(netlink.get(), &answer, sizeof answer, 0) >=
                             static_cast<ssize_t>(NLMSG_LENGTH(sizeof(int))) &&
                         answer.header.nlmsg_type == NLMSG_ERROR && answer.body.error == 0;
      if (!ended) ++count;
    }
  }
  return count;
}

Result<void> wait_for_ports(const Environment& env, const Manifest& manifest) {
  std::set<std::uint16_t> ports;
  for (const ProcessRecord& record : manifest.processes)
    ports.insert(record.tcp_ports.begin(), record.tcp_ports.end());
  if (ports.empty() || count_time_waits(ports, true) == 0) return {};
  env.tell(
      "waiting for TCP ports of the job: their last connections were closed less than a minute "
      "ago");
  const auto start = Clock::now();
  while (count_time_waits(ports, true) != 0) {
    if (auto stop = env.interrupt.check(); !stop) return stop;
    if (since(start) > kTimeWait) {
      // CRIU may know better, and says so if it does not.
      env.tell(fmt::format("closed connections still hold a port of the job, one of {}",
                           fmt::join(ports, ", ")));
      return {};
    }
    std::this_thread::sleep_for(kPoll);
  }
  return {};
}

}  // namespace stasis
