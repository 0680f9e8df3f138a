#include "proc/unix_peers.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string_view>

#include "base/fd.h"
#include "proc/netlink.h"

namespace stasis::proc {
namespace {

using Peers = std::map<std::uint64_t, UnixPeer>;
// An attribute of a socket.
using Visit =
    std::function<void(const unix_diag_msg& socket, unsigned type, std::string_view value)>;

// One answer: a unix_diag_msg and its attributes.
void read_answer(const char* data, std::size_t size, const Visit& visit) {
  unix_diag_msg message{};
  if (size < sizeof message) return;
  std::memcpy(&message, data, sizeof message);
  rtattr attribute{};
  for (std::size_t at = NLMSG_ALIGN(sizeof message); at + sizeof attribute <= size;
       at += RTA_ALIGN(attribute.rta_len)) {
    std::memcpy(&attribute, data + at, sizeof attribute);
    if (attribute.rta_len < RTA_LENGTH(0) || attribute.rta_len > size - at) return;
    visit(message, attribute.rta_type,
          {data + at + RTA_LENGTH(0), attribute.rta_len - RTA_LENGTH(0)});
  }
}

// What `show` (UDIAG_SHOW_*) asks for, of the sockets in these states.
Result<void> ask(std::uint32_t states, std::uint32_t show, const Visit& visit) {
  const UniqueFd netlink = open_netlink(NETLINK_SOCK_DIAG);
  struct {
    nlmsghdr header;
    unix_diag_req body;
  } request{};
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  request.body.sdiag_family = AF_UNIX;
  request.body.udiag_states = states;
  request.body.udiag_show = show;
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  if (!netlink.valid() ||
      ::sendto(netlink.get(), &request, sizeof request, 0,
               reinterpret_cast<const sockaddr*>(&kernel), sizeof kernel) != sizeof request) {
    return fail(errno_error("cannot ask the kernel about unix sockets", errno));
  }
  std::array<char, 32768> buffer;
  for (;;) {
    const ssize_t got = ::recv(netlink.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0) return fail(errno_error("no answer about unix sockets", got < 0 ? errno : EIO));
    const auto size = static_cast<std::size_t>(got);
    nlmsghdr header{};
    for (std::size_t at = 0; at + sizeof header <= size; at += NLMSG_ALIGN(header.nlmsg_len)) {
      std::memcpy(&header, buffer.data() + at, sizeof header);
      if (header.nlmsg_type == NLMSG_DONE) return {};
      if (header.nlmsg_len < sizeof header || header.nlmsg_len > size - at ||
          header.nlmsg_type == NLMSG_ERROR) {
        return fail(ErrorCode::kIo, "the kernel does not tell of unix sockets");
      }
      read_answer(buffer.data() + at + NLMSG_HDRLEN, header.nlmsg_len - NLMSG_HDRLEN, visit);
    }
  }
}

}  // namespace

Result<Peers> unix_peers() {
  Peers out;
  STASIS_TRY(ask(~0U, UDIAG_SHOW_PEER,
                 [&](const unix_diag_msg& socket, unsigned type, std::string_view value) {
                   std::uint32_t peer = 0;
                   if (type != UNIX_DIAG_PEER || value.size() < sizeof peer) return;
                   std::memcpy(&peer, value.data(), sizeof peer);
                   if (peer != 0)
                     out.insert({socket.udiag_ino, {peer, socket.udiag_type == SOCK_DGRAM}});
                 }));
  return out;
}

Result<std::map<std::uint64_t, std::uint32_t>> unix_backlogs() {
  std::map<std::uint64_t, std::uint32_t> out;
  STASIS_TRY(ask(1U << TCP_LISTEN, UDIAG_SHOW_RQLEN,
                 [&](const unix_diag_msg& socket, unsigned type, std::string_view value) {
                   unix_diag_rqlen queue{};
                   if (type != UNIX_DIAG_RQLEN || value.size() < sizeof queue) return;
                   std::memcpy(&queue, value.data(), sizeof queue);
                   // Of a socket that listens: its length at most (net/unix/diag.c).
                   out.insert({socket.udiag_ino, queue.udiag_wqueue});
                 }));
  return out;
}

Result<std::map<std::uint64_t, std::uint64_t>> unix_names() {
  std::map<std::uint64_t, std::uint64_t> out;
  STASIS_TRY(ask(~0U, UDIAG_SHOW_VFS,
                 [&](const unix_diag_msg& socket, unsigned type, std::string_view value) {
                   unix_diag_vfs place{};
                   if (type != UNIX_DIAG_VFS || value.size() < sizeof place) return;
                   std::memcpy(&place, value.data(), sizeof place);
                   out.insert({socket.udiag_ino, place.udiag_vfs_ino});
                 }));
  return out;
}

}  // namespace stasis::proc
