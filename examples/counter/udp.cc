#include "examples/counter/udp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstring>

#include "examples/common/cuda_api.h"

namespace stasis::counter {
namespace {

using programs::die;

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

UniqueFd udp_socket() {
  UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) die(1, std::string("cannot make a UDP socket: ") + std::strerror(errno));
  return fd;
}

}  // namespace

UdpServer::UdpServer(std::uint16_t port) : socket_(udp_socket()) {
  sockaddr_in address = loopback(port);
  if (bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    die(1, "cannot listen on 127.0.0.1:" + std::to_string(port) + ": " + std::strerror(errno) +
               (errno == EADDRINUSE ? "; choose another --port, or 0 for any" : ""));
  }
  socklen_t size = sizeof address;
  if (getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    die(1, std::string("cannot learn the port: ") + std::strerror(errno));
  }
  port_ = ntohs(address.sin_port);
}

bool UdpServer::receive() {
  char packet[2048];
  sockaddr_in peer{};
  socklen_t size = sizeof peer;
  if (recvfrom(socket_.get(), packet, sizeof packet, 0, reinterpret_cast<sockaddr*>(&peer), &size) <
      0) {
    // A signal, or the ICMP answer to a reply that was no longer waited for.
    if (errno == EINTR || errno == ECONNREFUSED) return false;
    die(1, std::string("cannot receive: ") + std::strerror(errno));
  }
  peer_address_ = peer.sin_addr.s_addr;
  peer_port_ = peer.sin_port;
  return true;
}

void UdpServer::reply(const std::string& text) {
  sockaddr_in peer = loopback(0);
  peer.sin_addr.s_addr = peer_address_;
  peer.sin_port = peer_port_;
  if (sendto(socket_.get(), text.data(), text.size(), 0, reinterpret_cast<sockaddr*>(&peer),
             sizeof peer) < 0) {
    die(1, std::string("cannot answer: ") + std::strerror(errno));
  }
}

std::optional<std::string> ask(std::uint16_t port, int timeout_s) {
  UniqueFd fd = udp_socket();
  const timeval timeout{timeout_s, 0};
  const sockaddr_in server = loopback(port);
  const char question[] = "increment\n";
  if (setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&server), sizeof server) != 0 ||
      send(fd.get(), question, sizeof question - 1, 0) < 0) {
    die(1, "cannot send to 127.0.0.1:" + std::to_string(port) + ": " + std::strerror(errno));
  }
  char answer[64];
  const ssize_t got = recv(fd.get(), answer, sizeof answer, 0);
  if (got >= 0) return std::string(answer, static_cast<std::size_t>(got));
  if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
  if (errno == ECONNREFUSED) {
    die(1, "no program listens on 127.0.0.1:" + std::to_string(port) + " (connection refused)");
  }
  die(1, std::string("cannot receive: ") + std::strerror(errno));
}

}  // namespace stasis::counter
